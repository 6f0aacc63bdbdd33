/* The order in which sources take turns; see `loaderkit/sampling/interleaving.py` and `token_mixture.py`. */
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

/* -------------------------------------------------------------------------------------- turns of unequal length */

static int64_t floor_div(int64_t value, int64_t by) { return value / by - (value % by < 0); }

/* a / b < c / d, both in [0, 1), without products that overflow. */
static int is_less(int64_t a, int64_t b, int64_t c, int64_t d) {
    while (a > 0 && c > 0) {
        const int64_t one = d / c, other = b / a;
        if (one != other) {
            return one < other;
        }
        const int64_t rest = d % c, other_rest = b % a;
        b = c;
        d = a;
        a = rest;
        c = other_rest;
    }
    return a == 0 && c > 0;
}

typedef struct {
    int64_t *lags, *nexts, *since, *earliest, *due, *rest, *keys; /* lags[m] is that at since[m] */
    const int64_t *weights, *lengths, *ends;
    int64_t total;
    Py_ssize_t num;
} turns;

/* When source m may have its next turn, and when that should have ended: due + rest / weight, in tokens from the first turn. */
INLINE void set_times(turns *all, Py_ssize_t m) {
    const int64_t weight = all->weights[m], lag = all->lags[m], since = all->since[m];
    const int64_t left = all->total * all->lengths[all->nexts[m]] - lag, whole = floor_div(left, weight);
    all->earliest[m] = since + (lag < 0 ? ceil_div(-lag, weight) : 0);
    all->due[m] = since + whole;
    all->rest[m] = left - whole * weight;
}

/* Turns until there are `most`, or a source has none left; returns their number. */
INLINE Py_ssize_t walk_lengths(turns *all, int64_t *rows, Py_ssize_t most) {
    const Py_ssize_t num = all->num;
    int64_t now = 0;
    Py_ssize_t turn = 0;
    for (Py_ssize_t m = 0; m < num; m++) {
        all->since[m] = 0;
        set_times(all, m);
    }
    while (turn < most) {
        int64_t soonest = INT64_MAX, *keys = all->keys;
        for (Py_ssize_t m = 0; m < num; m++) {
            keys[m] = all->earliest[m] <= now ? all->due[m] : INT64_MAX;
        }
        for (Py_ssize_t m = 0; m < num; m++) {
            soonest = keys[m] < soonest ? keys[m] : soonest;
        }
        Py_ssize_t first = -1;
        for (Py_ssize_t m = 0; m < num; m++) {
            if (keys[m] == soonest &&
                (first < 0 || is_less(all->rest[m], all->weights[m], all->rest[first], all->weights[first]))) {
                first = m;
            }
        }
        const int64_t row = all->nexts[first]++, length = all->lengths[row];
        rows[turn++] = row;
        now += length;
        all->lags[first] += (now - all->since[first]) * all->weights[first] - length * all->total;
        all->since[first] = now;
        if (all->nexts[first] == all->ends[first]) {
            break;
        }
        set_times(all, first);
    }
    for (Py_ssize_t m = 0; m < num; m++) {
        all->lags[m] += (now - all->since[m]) * all->weights[m];
    }
    return turn;
}

#ifdef HAVE_AVX2
__attribute__((target("avx2"))) static Py_ssize_t walk_lengths_avx2(turns *all, int64_t *rows, Py_ssize_t most) {
    return walk_lengths(all, rows, most);
}
#endif

static Py_ssize_t take_unequal_turns(turns *all, int64_t *rows, Py_ssize_t most) {
#ifdef HAVE_AVX2
    if (have_avx2()) {
        return walk_lengths_avx2(all, rows, most);
    }
#endif
    return walk_lengths(all, rows, most);
}

/* interleave_lengths(lags, weights, lengths, nexts, ends, rows) -> number of turns: fills that many of `rows`, and leaves in
 * `lags` and `nexts` what they are then. */
PyObject *interleave_lengths(PyObject *self, PyObject *args) {
    PyObject *objects[6];
    Py_buffer views[6];
    Py_ssize_t step, num_turns = -1;
    int num_open = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &objects[5])) {
        return NULL;
    }
    for (; num_open < 6; num_open++) {
        const int is_written = num_open == 0 || num_open == 3 || num_open == 5;
        if (get_column(objects[num_open], &views[num_open], -1, is_written ? PyBUF_WRITABLE : 0, &step) < 0) {
            break;
        }
    }
    if (num_open == 6) {
        const Py_ssize_t num = views[0].len / 8, most = views[5].len / 8;
        turns all = {.lags = views[0].buf, .weights = views[1].buf, .lengths = views[2].buf, .nexts = views[3].buf,
                     .ends = views[4].buf, .num = num};
        int fits = num > 0 && views[1].len == views[0].len && views[3].len == views[0].len && views[4].len == views[0].len;
        for (Py_ssize_t m = 0; fits && m < num; m++) {
            fits = all.weights[m] > 0 && 0 <= all.nexts[m] && all.nexts[m] < all.ends[m] && all.ends[m] <= views[2].len / 8;
            all.total += fits ? all.weights[m] : 0;
        }
        int64_t *memory = PyMem_Malloc(5 * sizeof(int64_t) * (size_t)(num + 1));
        if (memory == NULL) {
            PyErr_NoMemory();
        } else if (!fits) {
            PyErr_SetString(PyExc_ValueError, "every source has a weight above 0 and a length to come");
        } else {
            all.since = memory;
            all.earliest = memory + num;
            all.due = memory + 2 * num;
            all.rest = memory + 3 * num;
            all.keys = memory + 4 * num;
            PyThreadState *state = most >= LEAST_WORTH_THE_GIL ? PyEval_SaveThread() : NULL;
            num_turns = take_unequal_turns(&all, views[5].buf, most);
            if (state != NULL) {
                PyEval_RestoreThread(state);
            }
        }
        PyMem_Free(memory);
    }
    while (num_open-- > 0) {
        PyBuffer_Release(&views[num_open]);
    }
    return num_turns < 0 ? NULL : PyLong_FromSsize_t(num_turns);
}
