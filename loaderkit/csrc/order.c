/* The arithmetic of the order (`loaderkit/keyed.py` says what it is), and keys and places of samples. */
#include "kernels.h"

#define GOLDEN 0x9E3779B97F4A7C15u
#define MIX_1 0xBF58476D1CE4E5B9u
#define MIX_2 0x94D049BB133111EBu
#define NUM_ROUNDS 16
#define LANES 8
#define MOST_DIGITS 20
#define LEAST_WORTH_THE_GIL 512

static uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 30)) * MIX_1;
    value = (value ^ (value >> 27)) * MIX_2;
    return value ^ (value >> 31);
}

static uint64_t scaled(uint64_t value, uint64_t key, uint64_t below) {
    value = (value * GOLDEN) ^ key;
    value = (value ^ (value >> 32)) * MIX_1;
    value = (value ^ (value >> 29)) * MIX_2;
    return ((value >> 32) * below) >> 32;
}

/* Positions through the network on Z_a x Z_b, once. Several side by side: a round waits for the one before it, and one
 * position alone leaves the CPU idle for most of that time. */
static inline void pass(int64_t *values, int count, uint64_t a, uint64_t b, const uint64_t *keys) {
    uint64_t left[LANES], right[LANES];
    for (int i = 0; i < count; i++) {
        left[i] = (uint64_t)values[i] / b;
        right[i] = (uint64_t)values[i] - left[i] * b;
    }
    for (int r = 0; r < NUM_ROUNDS; r += 2) {
        for (int i = 0; i < count; i++) {
            const uint64_t sum = left[i] + scaled(right[i], keys[r], a);
            left[i] = sum - (a & -(uint64_t)(sum >= a));
        }
        for (int i = 0; i < count; i++) {
            const uint64_t sum = right[i] + scaled(left[i], keys[r + 1], b);
            right[i] = sum - (b & -(uint64_t)(sum >= b));
        }
    }
    for (int i = 0; i < count; i++) {
        values[i] = (int64_t)(left[i] * b + right[i]);
    }
}

/* Up to LANES positions, walked until all are below `size`. */
static void walk(int64_t *values, int count, int64_t size, uint64_t a, uint64_t b, const uint64_t *keys) {
    if (count == LANES) {
        pass(values, LANES, a, b, keys);
    } else {
        for (int i = 0; i < count; i++) {
            pass(values + i, 1, a, b, keys);
        }
    }
    for (int i = 0; i < count; i++) {
        while (values[i] >= size) {
            pass(values + i, 1, a, b, keys);
        }
    }
}

/* One column: `count` numbers of 8 bytes, or one that holds for all (then *step is 0). -1 with a ValueError. */
static int get_column(PyObject *object, Py_buffer *view, Py_ssize_t count, int flags, Py_ssize_t *step) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | flags) < 0) {
        return -1;
    }
    if (view->itemsize != 8 || (count >= 0 && view->len / 8 != count && view->len / 8 != 1)) {
        PyErr_SetString(PyExc_ValueError, "columns are 64-bit numbers, all of one length, or one number");
        PyBuffer_Release(view);
        return -1;
    }
    *step = view->len / 8 == 1 ? 0 : 1;
    return 0;
}

/* permute(values, sizes, a, b, keys): every position becomes its image, in place. */
PyObject *permute(PyObject *self, PyObject *args) {
    PyObject *objects[5];
    Py_buffer views[5];
    Py_ssize_t steps[5];
    int num_open = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4])) {
        return NULL;
    }
    Py_ssize_t count = -1;
    for (; num_open < 5; num_open++) {
        const int flags = num_open == 0 ? PyBUF_WRITABLE : 0;
        if (get_column(objects[num_open], &views[num_open], count, flags, &steps[num_open]) < 0) {
            break;
        }
        count = num_open == 0 ? views[0].len / 8 : count;
    }
    if (num_open == 5) {
        int64_t *values = views[0].buf;
        const int64_t *sizes = views[1].buf, *as = views[2].buf, *bs = views[3].buf;
        const uint64_t *bases = views[4].buf;
        PyThreadState *state = count >= LEAST_WORTH_THE_GIL ? PyEval_SaveThread() : NULL;
        uint64_t keys[NUM_ROUNDS];
        const int lanes = steps[1] || steps[2] || steps[3] || steps[4] ? 1 : LANES;
        for (Py_ssize_t i = 0; i < count; i += lanes) {
            if (i == 0 || steps[4]) {
                for (int r = 0; r < NUM_ROUNDS; r++) {
                    keys[r] = mixed(bases[i * steps[4]] + (uint64_t)(r + 1) * GOLDEN);
                }
            }
            walk(values + i, (int)(count - i < lanes ? count - i : lanes), sizes[i * steps[1]], (uint64_t)as[i * steps[2]],
                 (uint64_t)bs[i * steps[3]], keys);
        }
        if (state != NULL) {
            PyEval_RestoreThread(state);
        }
    }
    const int is_done = num_open == 5;
    while (num_open-- > 0) {
        PyBuffer_Release(&views[num_open]);
    }
    if (!is_done) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* decimals(numbers) -> list of str: numbers from 0 on, int64 [n], as they are written. */
PyObject *decimals(PyObject *self, PyObject *object) {
    Py_buffer view;
    Py_ssize_t step;
    (void)self;
    if (get_column(object, &view, -1, 0, &step) < 0) {
        return NULL;
    }
    const int64_t *numbers = view.buf;
    const Py_ssize_t count = view.len / 8;
    PyObject *found = PyList_New(count);
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        char digits[MOST_DIGITS];
        int at = MOST_DIGITS;
        uint64_t left = (uint64_t)numbers[i];
        do {
            digits[--at] = (char)('0' + left % 10);
            left /= 10;
        } while (left > 0);
        PyObject *text = PyUnicode_DecodeASCII(digits + at, MOST_DIGITS - at, NULL);
        if (text == NULL) {
            Py_CLEAR(found);
        } else {
            PyList_SET_ITEM(found, i, text);
        }
    }
    PyBuffer_Release(&view);
    return found;
}

/* texts(data, ends, places) -> list of str: of the texts in UTF-8 that lie one behind another in `data` and end at `ends`,
 * those at `places`. Bytes that are no UTF-8 become lone surrogates, as in the names of files. */
PyObject *texts(PyObject *self, PyObject *args) {
    PyObject *objects[2], *found = NULL;
    Py_buffer data, ends, places;
    Py_ssize_t step;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*OO", &data, &objects[0], &objects[1])) {
        return NULL;
    }
    if (get_column(objects[0], &ends, -1, 0, &step) == 0) {
        if (get_column(objects[1], &places, -1, 0, &step) == 0) {
            const int64_t *end = ends.buf, *place = places.buf, num = ends.len / 8;
            const Py_ssize_t count = places.len / 8;
            found = PyList_New(count);
            for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
                const int64_t at = place[i];
                const int64_t from = at > 0 && at < num ? end[at - 1] : 0, to = at >= 0 && at < num ? end[at] : -1;
                PyObject *text = NULL;
                if (to >= from && from >= 0 && to <= data.len) {
                    text = PyUnicode_DecodeUTF8((const char *)data.buf + from, (Py_ssize_t)(to - from), "surrogateescape");
                } else {
                    PyErr_Format(PyExc_IndexError, "text %lld of %lld", (long long)at, (long long)num);
                }
                if (text == NULL) {
                    Py_CLEAR(found);
                } else {
                    PyList_SET_ITEM(found, i, text);
                }
            }
            PyBuffer_Release(&places);
        }
        PyBuffer_Release(&ends);
    }
    PyBuffer_Release(&data);
    return found;
}

/* The last of `firsts` that is not above `index`: looked for where the one before was, where most are. */
static Py_ssize_t shard_of(const int64_t *firsts, Py_ssize_t count, Py_ssize_t before, int64_t index) {
    Py_ssize_t low = 0, high = count;
    if (firsts[before] <= index && (before + 1 == count || index < firsts[before + 1])) {
        return before;
    }
    while (high - low > 1) {
        const Py_ssize_t middle = low + (high - low) / 2;
        if (firsts[middle] <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Fill the four lists for all samples; -1 with an error. columns: indices, offsets, starts, sizes, firsts. */
static int fill_members(PyObject *const lists[4], const Py_buffer columns[5], Py_ssize_t num_members, PyObject *const names[2]) {
    const int64_t *indices = columns[0].buf, *offsets = columns[1].buf, *starts = columns[2].buf, *sizes = columns[3].buf;
    const Py_ssize_t num_fields = columns[1].len / 8, num_places = columns[2].len / 8, num_shards = columns[4].len / 8;
    Py_ssize_t shard = 0;
    for (Py_ssize_t i = 0; i < columns[0].len / 8; i++) {
        if (indices[i] < 0 || indices[i] >= num_places / num_members) {
            PyErr_Format(PyExc_IndexError, "sample %lld of %zd", (long long)indices[i], num_places / num_members);
            return -1;
        }
        shard = shard_of(columns[4].buf, num_shards, shard, indices[i]);
        for (Py_ssize_t k = 0; k < num_fields; k++) {
            const Py_ssize_t place = (Py_ssize_t)indices[i] * num_members + (Py_ssize_t)offsets[k], at = i * num_fields + k;
            PyObject *start = PyLong_FromLongLong(starts[place]), *size = PyLong_FromLongLong(sizes[place]);
            PyList_SET_ITEM(lists[0], at, Py_NewRef(PyList_GET_ITEM(names[0], shard)));
            PyList_SET_ITEM(lists[1], at, start);
            PyList_SET_ITEM(lists[2], at, size);
            PyList_SET_ITEM(lists[3], at, Py_NewRef(PyList_GET_ITEM(names[1], shard)));
            if (start == NULL || size == NULL) {
                return -1;
            }
        }
    }
    return 0;
}

/* members(indices, offsets, num_members, starts, sizes, firsts, keys, etags) -> (keys, starts, sizes, etags), lists: of samples
 * that all have `num_members` members, one behind another, those at `offsets`; firsts: the first sample of every archive. In
 * NumPy 64 samples of two members take 12 us, which is a tenth of what their batch takes; here 2. */
PyObject *members(PyObject *self, PyObject *args) {
    PyObject *objects[5], *names[2], *lists[4] = {NULL, NULL, NULL, NULL}, *result = NULL;
    Py_buffer columns[5];
    Py_ssize_t num_members, step;
    int num_open = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOnOOOO!O!", &objects[0], &objects[1], &num_members, &objects[2], &objects[3], &objects[4],
                          &PyList_Type, &names[0], &PyList_Type, &names[1])) {
        return NULL;
    }
    while (num_open < 5 && get_column(objects[num_open], &columns[num_open], -1, 0, &step) == 0) {
        num_open++;
    }
    int is_well = num_open == 5;
    if (is_well) {
        const Py_ssize_t num_shards = columns[4].len / 8;
        const int64_t *offsets = columns[1].buf;
        is_well = num_members > 0 && num_shards > 0 && columns[2].len == columns[3].len && PyList_GET_SIZE(names[0]) >= num_shards &&
                  PyList_GET_SIZE(names[1]) >= num_shards;
        for (Py_ssize_t k = 0; k < columns[1].len / 8; k++) {
            is_well = is_well && offsets[k] >= 0 && offsets[k] < num_members;
        }
        if (!is_well) {
            PyErr_SetString(PyExc_ValueError, "members lie at offsets below their number, and every archive has a key and an etag");
        }
    }
    const Py_ssize_t count = is_well ? columns[0].len / 8 * (columns[1].len / 8) : 0;
    for (int k = 0; k < 4 && is_well; k++) {
        lists[k] = PyList_New(count);
        is_well = lists[k] != NULL;
    }
    if (is_well && fill_members(lists, columns, num_members, names) == 0) {
        result = PyTuple_Pack(4, lists[0], lists[1], lists[2], lists[3]);
    }
    for (int k = 0; k < 4; k++) {
        Py_XDECREF(lists[k]);
    }
    while (num_open-- > 0) {
        PyBuffer_Release(&columns[num_open]);
    }
    return result;
}
