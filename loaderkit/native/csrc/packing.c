/* Packing documents into sequences of one length; see `loaderkit/sampling/packing.py`. */
#include "kernels.h"
#include <string.h>

#define WORD 64
#define MOST_LEVELS 6
#define RADIX_BITS 11
#define MOST_MARKED (1 << 16) /* tokens, with the GIL held: 8 bytes each take 20 us */

/* The spaces, 0 to the capacity, that some open bin has left: bit s of level 0, and of each level above it the words that are
 * not 0. */
typedef struct {
    uint64_t *levels[MOST_LEVELS];
    int num_levels;
} Spaces;

static void set_space(Spaces *spaces, int64_t at) {
    for (int k = 0; k < spaces->num_levels; k++, at /= WORD) {
        spaces->levels[k][at / WORD] |= (uint64_t)1 << (at % WORD);
    }
}

static void clear_space(Spaces *spaces, int64_t at) {
    for (int k = 0; k < spaces->num_levels; k++, at /= WORD) {
        if ((spaces->levels[k][at / WORD] &= ~((uint64_t)1 << (at % WORD))) != 0) {
            return;
        }
    }
}

/* The least space that is at least `at`; -1: there is none. Every level has a word to spare, so `at` may lie one behind. */
static int64_t next_space(const Spaces *spaces, int64_t at) {
    for (int k = 0; k < spaces->num_levels; k++) {
        const uint64_t word = spaces->levels[k][at / WORD] & (~(uint64_t)0 << (at % WORD));
        if (word != 0) {
            at = at / WORD * WORD + __builtin_ctzll(word);
            while (k-- > 0) {
                at = at * WORD + __builtin_ctzll(spaces->levels[k][at]);
            }
            return at;
        }
        at = at / WORD + 1; /* in the level above: the words behind this one */
    }
    return -1;
}

/* Sorts `places` by the size of each, the largest first; those of one size stay in order. */
static void sort_decreasing(int64_t *places, int64_t *other, int64_t count, const int64_t *sizes, int64_t capacity) {
    int64_t counts[1 << RADIX_BITS];
    for (int shift = 0; (capacity >> shift) != 0; shift += RADIX_BITS) {
        memset(counts, 0, sizeof counts);
        for (int64_t i = 0; i < count; i++) {
            counts[((capacity - sizes[places[i]]) >> shift) & ((1 << RADIX_BITS) - 1)]++;
        }
        for (int64_t d = 0, before = 0; d < 1 << RADIX_BITS; d++) {
            const int64_t here = counts[d];
            counts[d] = before;
            before += here;
        }
        for (int64_t i = 0; i < count; i++) {
            other[counts[((capacity - sizes[places[i]]) >> shift) & ((1 << RADIX_BITS) - 1)]++] = places[i];
        }
        memcpy(places, other, (size_t)count * sizeof *places);
    }
}

/* Best fit, decreasing, of one window; returns the number of bins. `heads`: by space, the newest bin that has it, or -1, all -1
 * again at the end; `nexts`: by bin, the next older one of that space. */
static int64_t pack_window(const int64_t *sizes, int64_t count, int64_t capacity, int64_t *bins, int64_t *memory, int64_t *heads, Spaces *spaces) {
    int64_t *places = memory, *nexts = memory + count, num_places = 0, num_bins = 0;
    for (int64_t i = 0; i < count; i++) {
        bins[i] = -1;
        if (sizes[i] > 0) {
            places[num_places++] = i;
        }
    }
    sort_decreasing(places, nexts, num_places, sizes, capacity);
    for (int64_t i = 0; i < num_places; i++) {
        const int64_t size = sizes[places[i]], space = next_space(spaces, size);
        int64_t bin = num_bins, left = capacity - size;
        if (space < 0) {
            num_bins++;
        } else {
            bin = heads[space];
            left = space - size;
            heads[space] = nexts[bin];
            if (heads[space] < 0) {
                clear_space(spaces, space);
            }
        }
        bins[places[i]] = bin;
        if (left > 0) {
            nexts[bin] = heads[left];
            heads[left] = bin;
            set_space(spaces, left);
        }
    }
    for (int64_t at = next_space(spaces, 0); at >= 0; at = next_space(spaces, 0)) {
        heads[at] = -1;
        clear_space(spaces, at);
    }
    return num_bins;
}

/* best_fit(sizes, capacity, bounds, bins, counts): packs sizes of 0 to `capacity`, window by window, [bounds[w], bounds[w + 1]),
 * into bins. bins[i] becomes the bin of size i in its window, -1 for a size of 0; counts[w] the number of bins of the window. */
PyObject *best_fit(PyObject *self, PyObject *args) {
    PyObject *objects[4];
    Py_buffer views[4];
    Py_ssize_t step;
    long long capacity;
    int num_open = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OLOOO", &objects[0], &capacity, &objects[1], &objects[2], &objects[3])) {
        return NULL;
    }
    while (num_open < 4 && get_column(objects[num_open], &views[num_open], -1, num_open < 2 ? 0 : PyBUF_WRITABLE, &step) == 0) {
        num_open++;
    }
    int is_done = 0;
    if (num_open == 4) {
        const int64_t *sizes = views[0].buf, *bounds = views[1].buf, num_sizes = views[0].len / 8;
        const Py_ssize_t num_windows = views[1].len / 8 - 1;
        int64_t longest = 0;
        int fits = capacity >= 1 && capacity < (long long)1 << 36 && views[2].len == views[0].len && views[3].len / 8 == num_windows &&
                   num_windows >= 1 && bounds[0] >= 0 && bounds[num_windows] <= num_sizes;
        for (Py_ssize_t w = 0; fits && w < num_windows; w++) {
            const int64_t count = bounds[w + 1] - bounds[w];
            fits = count >= 0;
            longest = count > longest ? count : longest;
        }
        for (int64_t i = 0; fits && i < num_sizes; i++) {
            fits = sizes[i] >= 0 && sizes[i] <= capacity;
        }
        if (!fits) {
            PyErr_SetString(PyExc_ValueError, "sizes lie between 0 and the capacity, and windows in their column");
        } else {
            Spaces spaces = {{NULL}, 0};
            int64_t *heads = PyMem_RawMalloc((size_t)(capacity + 1) * sizeof *heads);
            int64_t *memory = PyMem_RawMalloc((size_t)(2 * longest + 1) * sizeof *memory);
            int has_memory = heads != NULL && memory != NULL;
            for (int64_t size = capacity + 1; has_memory; size = (size + WORD - 1) / WORD) {
                uint64_t *level = PyMem_RawCalloc((size_t)(size / WORD + 2), sizeof *level);
                spaces.levels[spaces.num_levels++] = level;
                has_memory = level != NULL;
                if (size <= WORD) {
                    break;
                }
            }
            if (has_memory) {
                Py_BEGIN_ALLOW_THREADS;
                memset(heads, -1, (size_t)(capacity + 1) * sizeof *heads);
                for (Py_ssize_t w = 0; w < num_windows; w++) {
                    ((int64_t *)views[3].buf)[w] = pack_window(sizes + bounds[w], bounds[w + 1] - bounds[w], capacity,
                                                               (int64_t *)views[2].buf + bounds[w], memory, heads, &spaces);
                }
                Py_END_ALLOW_THREADS;
                is_done = 1;
            } else {
                PyErr_NoMemory();
            }
            for (int k = 0; k < spaces.num_levels; k++) {
                PyMem_RawFree(spaces.levels[k]);
            }
            PyMem_RawFree(memory);
            PyMem_RawFree(heads);
        }
    }
    while (num_open-- > 0) {
        PyBuffer_Release(&views[num_open]);
    }
    if (!is_done) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Fills the places of the tokens of one document, and its number, where they are wanted. */
static void mark(int32_t *positions, int32_t *documents, int32_t count, int32_t number) {
    for (int32_t k = 0; k < (positions == NULL ? 0 : count); k++) {
        positions[k] = k;
    }
    for (int32_t k = 0; k < (documents == NULL ? 0 : count); k++) {
        documents[k] = number;
    }
}

/* The fields of some bins; see `mark_documents`. */
typedef struct {
    Py_ssize_t length, item, begin;
    int32_t *positions, *documents, *starts;
    char *tokens;
} Marks;

/* Marks the documents of bin `bin`, which have these lengths. `num`: the number of starts before; returns it with this bin's. */
static int64_t mark_bin(const Marks *marks, Py_ssize_t bin, const int64_t *lengths, int64_t count, int64_t num) {
    const Py_ssize_t first = bin * marks->length;
    Py_ssize_t at = 0;
    for (int64_t i = 0; i <= count; i++) {
        const int is_padding = i == count;
        const Py_ssize_t size = is_padding ? marks->length - at : lengths[i];
        if (is_padding && size == 0) {
            break;
        }
        marks->starts[num++] = (int32_t)(marks->begin + first + at);
        mark(marks->positions == NULL ? NULL : marks->positions + first + at,
             marks->documents == NULL ? NULL : marks->documents + first + at, (int32_t)size, is_padding ? -1 : (int32_t)i);
        if (is_padding) {
            memset(marks->tokens + (first + at) * marks->item, 0, (size_t)(size * marks->item));
        }
        at += size;
    }
    return num;
}

/* mark_documents(lengths, firsts, length, positions, documents, tokens, begin, starts, ends): fills int32 [bins, length] of the place of
 * every token in its document, and of its document's number in the bin, -1 behind the last, where `tokens` are set to 0; a field
 * of no bytes is not wanted. The documents of bin b are those from firsts[b] to firsts[b + 1]. `starts`, int32 [documents + bins],
 * gets where documents and paddings begin when the bins lie end to end, the first at `begin`; ends[b] where those of bin b end. */
PyObject *mark_documents(PyObject *self, PyObject *args) {
    PyObject *objects[3];
    Py_buffer columns[3], fields[4];
    Py_ssize_t length, begin, step;
    int num_open = 0, is_done = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOnw*w*w*nw*O", &objects[0], &objects[1], &length, &fields[0], &fields[1], &fields[2], &begin,
                          &fields[3], &objects[2])) {
        return NULL;
    }
    while (num_open < 3 && get_column(objects[num_open], &columns[num_open], -1, num_open < 2 ? 0 : PyBUF_WRITABLE, &step) == 0) {
        num_open++;
    }
    if (num_open == 3) {
        const int64_t *lengths = columns[0].buf, *firsts = columns[1].buf;
        int64_t *ends = columns[2].buf;
        const Py_ssize_t num_bins = columns[1].len / 8 - 1;
        int fits = length >= 1 && begin >= 0 && num_bins >= 1 && num_bins <= INT32_MAX && length <= (INT32_MAX - begin) / num_bins &&
                   fields[2].len % (num_bins * length) == 0 &&
                   columns[2].len / 8 == num_bins && firsts[0] >= 0 && firsts[num_bins] <= columns[0].len / 8 &&
                   fields[3].len / 4 >= firsts[num_bins] - firsts[0] + num_bins;
        for (int k = 0; fits && k < 2; k++) {
            fits = fields[k].len == 0 || fields[k].len / 4 == num_bins * length;
        }
        for (Py_ssize_t b = 0; fits && b < num_bins; b++) {
            int64_t used = 0;
            fits = firsts[b] <= firsts[b + 1];
            for (int64_t i = firsts[b]; fits && i < firsts[b + 1]; i++) {
                fits = lengths[i] >= 0 && lengths[i] <= length - used;
                used += lengths[i];
            }
        }
        if (!fits) {
            PyErr_SetString(PyExc_ValueError, "the documents must fit their bins, and the fields be [bins, length]");
        } else {
            const Marks marks = {
                .length = length,
                .begin = begin,
                .item = fields[2].len / (num_bins * length),
                .positions = fields[0].len ? fields[0].buf : NULL,
                .documents = fields[1].len ? fields[1].buf : NULL,
                .starts = fields[3].buf,
                .tokens = fields[2].buf,
            };
            PyThreadState *state = num_bins * length > MOST_MARKED ? PyEval_SaveThread() : NULL;
            int64_t end = 0;
            for (Py_ssize_t b = 0; b < num_bins; b++) {
                ends[b] = end = mark_bin(&marks, b, lengths + firsts[b], firsts[b + 1] - firsts[b], end);
            }
            if (state != NULL) {
                PyEval_RestoreThread(state);
            }
            is_done = 1;
        }
    }
    while (num_open-- > 0) {
        PyBuffer_Release(&columns[num_open]);
    }
    for (int k = 0; k < 4; k++) {
        PyBuffer_Release(&fields[k]);
    }
    if (!is_done) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* take_pieces(samples, firsts, lengths, places, bounds, sequences, length): the pieces of some sequences, those of sequence i from
 * bounds[i] to bounds[i + 1]; `places` are those in sequences that lie end to end. Returns the bytes of int64: the same four columns
 * of the pieces taken, and their bounds. */
PyObject *take_pieces(PyObject *self, PyObject *args) {
    PyObject *objects[6], *result = NULL;
    Py_buffer views[6];
    Py_ssize_t step;
    long long length;
    int num_open = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOOOL", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &objects[5], &length)) {
        return NULL;
    }
    while (num_open < 6 && get_column(objects[num_open], &views[num_open], -1, 0, &step) == 0) {
        num_open++;
    }
    if (num_open == 6) {
        const int64_t *bounds = views[4].buf, *sequences = views[5].buf;
        const Py_ssize_t num_pieces = views[0].len / 8, num_sequences = views[4].len / 8 - 1, count = views[5].len / 8;
        Py_ssize_t total = 0;
        int fits = views[1].len == views[0].len && views[2].len == views[0].len && views[3].len == views[0].len;
        for (Py_ssize_t i = 0; fits && i < count; i++) {
            fits = sequences[i] >= 0 && sequences[i] < num_sequences;
            if (fits) {
                const int64_t begin = bounds[sequences[i]], end = bounds[sequences[i] + 1];
                fits = begin >= 0 && begin <= end && end <= num_pieces && end - begin <= PY_SSIZE_T_MAX / 64 - total;
                total += fits ? end - begin : 0;
            }
        }
        if (!fits) {
            PyErr_SetString(PyExc_IndexError, "sequences and their pieces must be among those given");
        } else if ((result = PyByteArray_FromStringAndSize(NULL, (4 * total + count + 1) * 8)) != NULL) {
            int64_t *to = (int64_t *)PyByteArray_AS_STRING(result), *places = to + 3 * total, *ends = to + 4 * total;
            Py_ssize_t at = 0;
            ends[0] = 0;
            for (Py_ssize_t i = 0; i < count; i++) {
                const int64_t begin = bounds[sequences[i]], here = bounds[sequences[i] + 1] - begin;
                const uint64_t moved = (uint64_t)(i - sequences[i]) * (uint64_t)length;
                for (int k = 0; k < 3; k++) {
                    memcpy(to + k * total + at, (const int64_t *)views[k].buf + begin, (size_t)here * 8);
                }
                for (int64_t j = 0; j < here; j++) {
                    places[at + j] = (int64_t)((uint64_t)((const int64_t *)views[3].buf)[begin + j] + moved);
                }
                at += here;
                ends[i + 1] = at;
            }
        }
    }
    while (num_open-- > 0) {
        PyBuffer_Release(&views[num_open]);
    }
    return result;
}
