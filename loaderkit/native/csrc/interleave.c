/* The order in which sources take turns; see `loaderkit/sampling/interleaving.py`. */
#include "kernels.h"

#define LEAST_WORTH_THE_GIL 256

#ifdef __GNUC__
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static inline
#endif

static int64_t ceil_div(int64_t value, int64_t by) { return value / by + (value % by > 0); }

static int32_t limited(int64_t turn) { return turn > INT32_MAX - 1 ? INT32_MAX - 1 : (int32_t)turn; }

/* One turn for every entry of `sources`: of those that may have a turn now, the source that has to have it first. Turns are
 * counted from 0 in 32 bits, as compilers make vectors of them. */
INLINE void walk(int64_t *lags, const int64_t *weights, Py_ssize_t num, int32_t *memory, int64_t *sources,
                       int64_t *places, Py_ssize_t num_turns) {
    int32_t *earliest = memory, *deadlines = memory + num, *keys = memory + 2 * num;
    int32_t *counts = memory + 3 * num, *since = memory + 4 * num; /* lags[m] is that before turn since[m] */
    int64_t total = 0;
    for (Py_ssize_t m = 0; m < num; m++) {
        total += weights[m];
    }
    for (Py_ssize_t m = 0; m < num; m++) {
        earliest[m] = lags[m] > 0 ? 0 : limited(-lags[m] / weights[m]);
        deadlines[m] = limited(ceil_div(total - lags[m], weights[m]));
        counts[m] = since[m] = 0;
    }
    for (int32_t turn = 0; turn < num_turns; turn++) {
        int32_t soonest = INT32_MAX;
        for (Py_ssize_t m = 0; m < num; m++) {
            keys[m] = earliest[m] <= turn ? deadlines[m] : INT32_MAX;
        }
        for (Py_ssize_t m = 0; m < num; m++) {
            soonest = keys[m] < soonest ? keys[m] : soonest;
        }
        int32_t first = (int32_t)num - 1;
        for (int32_t m = 0; m < (int32_t)num; m++) {
            const int32_t found = keys[m] == soonest ? m : INT32_MAX;
            first = found < first ? found : first;
        }
        sources[turn] = first;
        places[turn] = counts[first]++;
        const int64_t weight = weights[first];
        const int64_t lag = lags[first] + (turn + 1 - since[first]) * weight - total;
        lags[first] = lag;
        since[first] = turn + 1;
        earliest[first] = limited(turn + 1 + (lag > 0 ? 0 : -lag / weight));
        deadlines[first] = limited(turn + 1 + ceil_div(total - lag, weight));
    }
    for (Py_ssize_t m = 0; m < num; m++) {
        lags[m] += (num_turns - since[m]) * weights[m];
    }
}

#ifdef HAVE_AVX2
__attribute__((target("avx2"))) static void walk_avx2(int64_t *lags, const int64_t *weights, Py_ssize_t num,
                                                      int32_t *memory, int64_t *sources, int64_t *places,
                                                      Py_ssize_t num_turns) {
    walk(lags, weights, num, memory, sources, places, num_turns);
}
#endif

static void take_turns(int64_t *lags, const int64_t *weights, Py_ssize_t num, int32_t *memory, int64_t *sources,
                       int64_t *places, Py_ssize_t num_turns) {
#ifdef HAVE_AVX2
    if (have_avx2()) {
        walk_avx2(lags, weights, num, memory, sources, places, num_turns);
        return;
    }
#endif
    walk(lags, weights, num, memory, sources, places, num_turns);
}

/* interleave(lags, weights, sources, places): fills the last two, and leaves in `lags` what they are then. */
PyObject *interleave(PyObject *self, PyObject *args) {
    PyObject *objects[4];
    Py_buffer views[4];
    Py_ssize_t step;
    int num_open = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOO", &objects[0], &objects[1], &objects[2], &objects[3])) {
        return NULL;
    }
    for (; num_open < 4; num_open++) {
        const Py_ssize_t count = num_open % 2 ? views[num_open - 1].len / 8 : -1;
        if (get_column(objects[num_open], &views[num_open], count, num_open == 1 ? 0 : PyBUF_WRITABLE, &step) < 0) {
            break;
        }
        if (count >= 0 && views[num_open].len / 8 != count) {
            PyErr_SetString(PyExc_ValueError, "columns are 64-bit numbers, two and two of one length");
            PyBuffer_Release(&views[num_open]);
            break;
        }
    }
    int is_done = 0;
    if (num_open == 4) {
        const Py_ssize_t num = views[0].len / 8, num_turns = views[2].len / 8;
        int32_t *memory = PyMem_Malloc(5 * sizeof(int32_t) * (size_t)(num + 1));
        if (memory == NULL) {
            PyErr_NoMemory();
        } else {
            PyThreadState *state = num_turns >= LEAST_WORTH_THE_GIL ? PyEval_SaveThread() : NULL;
            take_turns(views[0].buf, views[1].buf, num, memory, views[2].buf, views[3].buf, num_turns);
            if (state != NULL) {
                PyEval_RestoreThread(state);
            }
            PyMem_Free(memory);
            is_done = 1;
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
