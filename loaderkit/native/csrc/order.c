/* The permutation of samples; see `loaderkit/sampling/permutation.py`. */
#include "kernels.h"

#define GOLDEN 0x9E3779B97F4A7C15u
#define MIX_1 0xBF58476D1CE4E5B9u
#define MIX_2 0x94D049BB133111EBu
#define NUM_ROUNDS 16
#define LANES 8
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

/* One pass of positions through the network on Z_a x Z_b, several at once: each round depends on the one before, so a single
 * position would leave the CPU idle most of the time. */
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

int get_column(PyObject *object, Py_buffer *view, Py_ssize_t count, int flags, Py_ssize_t *step) {
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

/* permute(values, sizes, a, b, keys): replaces every position by its image. */
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
