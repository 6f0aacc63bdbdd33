/* Samples that lie one behind another in large files. */
#include "kernels.h"
#include <string.h>

/* Numbers that grow. */
typedef struct {
    int64_t *items;
    Py_ssize_t count, room;
} Numbers;

static int append(Numbers *numbers, int64_t item) {
    if (numbers->count == numbers->room) {
        const Py_ssize_t room = numbers->room == 0 ? 1024 : 2 * numbers->room;
        int64_t *const items = PyMem_RawRealloc(numbers->items, (size_t)room * sizeof(int64_t));
        if (items == NULL) {
            return -1;
        }
        numbers->items = items;
        numbers->room = room;
    }
    numbers->items[numbers->count++] = item;
    return 0;
}

static PyObject *as_bytes(const Numbers *numbers) {
    return PyBytes_FromStringAndSize((const char *)numbers->items, numbers->count * (Py_ssize_t)sizeof(int64_t));
}

/* The line ends among 64 bytes, a bit each. */
static inline uint64_t line_ends(const char *at) {
    uint64_t bits = 0;
#ifdef __SSE2__
    for (int i = 0; i < 4; i++) {
        const __m128i found = _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)(at + 16 * i)), _mm_set1_epi8('\n'));
        bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(found) << (16 * i);
    }
#else
    for (int i = 0; i < 64; i++) {
        bits |= (uint64_t)(at[i] == '\n') << i;
    }
#endif
    return bits;
}

static inline int all_blank(const char *at, const char *stop) {
    while (at < stop && (*at == ' ' || *at == '\t' || *at == '\r')) {
        at++;
    }
    return at == stop;
}

/* Where lines begin behind those that end in `data`, and which of these are blank, counted from the first. */
static int find_lines(const char *data, Py_ssize_t size, int64_t begin, int *is_blank, Numbers *starts, Numbers *blanks) {
    const char *line = data; /* from here on the line is not looked at yet */
    char rest[64];
    for (Py_ssize_t i = 0; i < size; i += 64) {
        const char *at = data + i;
        if (size - i < 64) {
            memset(rest, 0, sizeof rest);
            at = memcpy(rest, at, (size_t)(size - i));
        }
        for (uint64_t bits = line_ends(at); bits != 0; bits &= bits - 1) {
            const char *const end = data + i + __builtin_ctzll(bits);
            if ((*is_blank && all_blank(line, end) && append(blanks, starts->count) < 0) ||
                append(starts, begin + (end + 1 - data)) < 0) {
                return -1;
            }
            *is_blank = 1;
            line = end + 1;
        }
    }
    *is_blank = *is_blank && all_blank(line, data + size);
    return 0;
}

PyObject *scan_lines(PyObject *self, PyObject *args) {
    Py_buffer data;
    long long begin;
    int is_blank, status;
    Numbers starts = {NULL, 0, 0}, blanks = {NULL, 0, 0};
    PyObject *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*Lp", &data, &begin, &is_blank)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    status = find_lines(data.buf, data.len, begin, &is_blank, &starts, &blanks);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&data);
    if (status < 0) {
        PyErr_NoMemory();
    } else {
        result = Py_BuildValue("NNN", as_bytes(&starts), as_bytes(&blanks), PyBool_FromLong(is_blank));
    }
    PyMem_RawFree(starts.items);
    PyMem_RawFree(blanks.items);
    return result;
}
