/* One worker's time by state, written by its thread and read by others; see `engine/metrics/worker_clock.py`.
 *
 * An entry costs 0.1 us, and 0.6 with the thread's CPU clock, a system call that is skipped where it tells nothing. In Python an
 * entry takes 1.1 us in a loop, and several times as much between the stages of a pipeline, which evict its code from the
 * caches. The caller holds the GIL, so no reader sees a partial entry. */
#include "kernels.h"

#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <structmember.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RING_LENGTH 256
#define BUCKETS_PER_OCTAVE 4
#define NUM_BUCKETS (40 * BUCKETS_PER_OCTAVE)
#define LOOK_S 1e-3   /* the cause of a wait is determined only if the thread was off the CPU for longer */
#define MOMENT_S 50e-6 /* a hand-off, not a wait; and a thread counts as computing for so short a time, unasked */

typedef struct {
    long long num_items, num_bytes, num_failed;
    double cpu_s, delayed_s;
    long long services[NUM_BUCKETS];
} Totals;

typedef struct {
    PyObject_HEAD
    PyObject *clock; /* NULL: time.perf_counter, read directly */
    PyObject *trace, *item, *slow_items, *least_s;
    int num_stages, num_states, open_state, has_thread, has_cpu_clock, is_stale;
    double since_s, delayed_since_s;
    double cpu_since_s; /* the thread's CPU time when the open interval began, if that is in a stage */
    pthread_t thread; /* who is in a stage, and the clock of its CPU time for others to read */
    clockid_t cpu_clock;
    Totals *totals;
    double *state_s;
    double mark_s[RING_LENGTH];
    int mark_state[RING_LENGTH];
    long num_marks;
} StateClock;

static double seconds_of(clockid_t clock) {
    struct timespec now;
    /* As Python counts: nanoseconds, divided. */
    return clock_gettime(clock, &now) < 0 ? -1.0 : (double)((long long)now.tv_sec * 1000000000LL + now.tv_nsec) / 1e9;
}

/* The time; -1 with an exception if the clock raises. */
static double now_of(const StateClock *self) {
    if (self->clock == NULL) {
        return seconds_of(CLOCK_MONOTONIC);
    }
    PyObject *result = PyObject_CallNoArgs(self->clock);
    const double now = result == NULL ? -1.0 : PyFloat_AsDouble(result);
    Py_XDECREF(result);
    return now;
}

/* Seconds that the calling thread was runnable without a CPU, as Linux counts them; 0 if it does not. */
static double delayed_so_far_s(void) {
    char text[64];
    const int fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return 0.0;
    }
    const ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    unsigned long long on_cpu, delayed;
    text[length > 0 ? length : 0] = '\0';
    return sscanf(text, "%llu %llu", &on_cpu, &delayed) == 2 ? (double)delayed * 1e-9 : 0.0;
}

PyObject *delayed(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    return PyFloat_FromDouble(delayed_so_far_s());
}

/* Measures the wait for the GIL alone: a thread that has woken up has a CPU already. */
PyObject *gil_wait(PyObject *self, PyObject *arg) {
    (void)self;
    const double sleep_s = PyFloat_AsDouble(arg);
    if (!(sleep_s >= 0.0 && sleep_s < 1.0)) {
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "a sleep is shorter than 1 s");
    }
    const struct timespec sleep = {0, (long)(sleep_s * 1e9)};
    PyThreadState *state = PyEval_SaveThread();
    nanosleep(&sleep, NULL);
    const double begin_s = seconds_of(CLOCK_MONOTONIC);
    PyEval_RestoreThread(state);
    return PyFloat_FromDouble(seconds_of(CLOCK_MONOTONIC) - begin_s);
}

static void mark(StateClock *self, double now, int state) {
    self->mark_s[self->num_marks % RING_LENGTH] = now;
    self->mark_state[self->num_marks % RING_LENGTH] = state;
    self->num_marks++;
}

/* The state with this number; -1 with a ValueError if there is none. */
static int state_of(const StateClock *self, PyObject *object, int num_states) {
    const long state = PyLong_AsLong(object);
    if (!(state == -1 && PyErr_Occurred()) && (state < 0 || state >= num_states)) {
        PyErr_Format(PyExc_ValueError, "state %ld of %d, %d of them stages", state, self->num_states, self->num_stages);
    }
    return PyErr_Occurred() ? -1 : (int)state;
}

static int record(const StateClock *self, double now, int state) {
    PyObject *entry = Py_BuildValue("(diO)", now, state, state < self->num_stages && self->item ? self->item : Py_None);
    PyObject *append = entry == NULL ? NULL : PyObject_GetAttrString(self->trace, "append");
    PyObject *done = append == NULL ? NULL : PyObject_CallOneArg(append, entry);
    Py_XDECREF(entry);
    Py_XDECREF(append);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* True if the calling thread differs from the one that was in a stage last; records the calling one. */
static int is_another_thread(StateClock *self) {
    const pthread_t thread = pthread_self();
    if (self->has_thread && pthread_equal(thread, self->thread)) {
        return 0;
    }
    self->thread = thread;
    self->has_thread = 1;
#ifdef __linux__
    self->has_cpu_clock = pthread_getcpuclockid(thread, &self->cpu_clock) == 0;
#endif
    return 1;
}

static PyObject *enter(StateClock *self, PyObject *object) {
    const int state = state_of(self, object, self->num_states), before = self->open_state;
    const double now = state < 0 ? -1.0 : now_of(self);
    if (PyErr_Occurred()) {
        return NULL;
    }
    const int was_stage = before < self->num_stages, is_stage = state < self->num_stages;
    const double passed_s = now - self->since_s, cpu_before_s = self->cpu_since_s;
    const int is_another = is_stage && !was_stage && is_another_thread(self);
    if (passed_s < MOMENT_S && !is_another && !(is_stage && self->is_stale)) {
        self->cpu_since_s += passed_s;
    } else if (was_stage || is_stage) {
        self->cpu_since_s = seconds_of(CLOCK_THREAD_CPUTIME_ID);
        self->is_stale = 0;
    } else { /* one wait follows another: the CPU time between them is read later, if at all */
        self->is_stale = 1;
    }
    const double cpu_s = fmin(fmax(0.0, self->cpu_since_s - cpu_before_s), fmax(0.0, passed_s));
    self->state_s[before] += passed_s;
    self->open_state = state;
    self->since_s = now;
    mark(self, now, state);
    if (was_stage) {
        Totals *totals = &self->totals[before];
        totals->cpu_s += cpu_s;
        if (passed_s - cpu_s > LOOK_S) {
            const double delayed_s = delayed_so_far_s(), more_s = delayed_s - self->delayed_since_s;
            totals->delayed_s += fmin(fmax(0.0, more_s), passed_s - cpu_s);
            self->delayed_since_s = delayed_s;
        }
    } else if (is_stage && (is_another || passed_s > LOOK_S)) {
        self->delayed_since_s = delayed_so_far_s();
    }
    if (self->trace != NULL && self->trace != Py_None && record(self, now, state) < 0) {
        return NULL;
    }
    return PyFloat_FromDouble(now);
}

/* Records a chunk that is among the slowest. `slowest_s`: set to the time of its slowest item, if that is known. */
static int note_slow(StateClock *self, int stage, PyObject *chunk, double each_s, double now, double *slowest_s) {
    PyObject *slowest = PyObject_GetAttrString(chunk, "slowest");
    if (slowest == NULL) {
        return -1;
    }
    const double least_s = PyFloat_AsDouble(PyList_GET_ITEM(self->least_s, stage));
    const int is_of_one = PyTuple_Check(slowest) && PyTuple_GET_SIZE(slowest) == 2;
    const double seconds = is_of_one ? PyFloat_AsDouble(PyTuple_GET_ITEM(slowest, 0)) : each_s;
    Py_DECREF(slowest);
    if (PyErr_Occurred()) {
        return -1;
    }
    if (is_of_one) {
        *slowest_s = seconds;
    }
    if (seconds <= least_s) { /* nearly always; saves the call of `note` */
        return is_of_one ? PyObject_SetAttrString(chunk, "slowest", Py_None) : 0;
    }
    PyObject *done = PyObject_CallMethod(self->slow_items, "note", "iOdd", stage, chunk, each_s, now);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static int bucket_of(double seconds) {
    const int bucket = seconds > 1e-9 ? (int)(log2(seconds * 1e9) * BUCKETS_PER_OCTAVE) : 0;
    return bucket < NUM_BUCKETS ? bucket : NUM_BUCKETS - 1;
}

static PyObject *served(StateClock *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 && count != 4) {
        PyErr_SetString(PyExc_TypeError, "served(stage, num_items, num_bytes, chunk=None)");
        return NULL;
    }
    const int stage = state_of(self, args[0], self->num_stages);
    const long long num_items = PyLong_AsLongLong(args[1]), num_bytes = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    Totals *totals = &self->totals[stage];
    totals->num_items += num_items;
    totals->num_bytes += num_bytes;
    if (num_items > 0) {
        const double now = now_of(self), each_s = (now - self->since_s) / (double)num_items;
        if (PyErr_Occurred()) {
            return NULL;
        }
        double slowest_s = each_s;
        if (count == 4 && args[3] != Py_None && note_slow(self, stage, args[3], each_s, now, &slowest_s) < 0) {
            return NULL;
        }
        const double all_s = each_s * (double)num_items;
        slowest_s = fmin(fmax(slowest_s, each_s), all_s);
        const double others_s = num_items > 1 ? (all_s - slowest_s) / (double)(num_items - 1) : 0.0;
        totals->services[bucket_of(slowest_s)] += 1; /* one slow item of a chunk does not make all of it slow */
        totals->services[bucket_of(others_s)] += num_items - 1;
    }
    Py_RETURN_NONE;
}

static PyObject *failed(StateClock *self, PyObject *args) {
    int stage, count;
    if (!PyArg_ParseTuple(args, "ii", &stage, &count)) {
        return NULL;
    }
    if (stage < 0 || stage >= self->num_stages) {
        PyErr_SetString(PyExc_ValueError, "there is no such stage");
        return NULL;
    }
    self->totals[stage].num_failed += count;
    Py_RETURN_NONE;
}

/* The part of [low_s, high_s) in the entry `back` entries before the latest: sets its `state`, begin and end. Returns 1, 0 if
 * that part is empty, and < 0 if the entry is older than the marks or ends before `low_s`. */
static int entry_of(const StateClock *self, long back, double low_s, double high_s, int *state, double *from_s, double *to_s) {
    const long kept = self->num_marks < RING_LENGTH ? self->num_marks : RING_LENGTH, place = self->num_marks - 1 - back;
    if (back >= kept) {
        return -1;
    }
    const double until_s = back ? self->mark_s[(place + 1) % RING_LENGTH] : high_s;
    if (back && until_s <= low_s) {
        return -1;
    }
    *state = self->mark_state[place % RING_LENGTH];
    *from_s = fmax(self->mark_s[place % RING_LENGTH], low_s);
    *to_s = fmin(until_s, high_s);
    return *to_s > *from_s;
}

static PyObject *timeline(StateClock *self, PyObject *args) {
    double start_s, end_s, from_s, to_s;
    int state, is_any;
    PyObject *intervals = PyArg_ParseTuple(args, "dd", &start_s, &end_s) ? PyList_New(0) : NULL;
    for (long back = 0; intervals && (is_any = entry_of(self, back, start_s, end_s, &state, &from_s, &to_s)) >= 0; back++) {
        PyObject *entry = is_any ? Py_BuildValue("(idd)", state, from_s, to_s) : NULL;
        if (is_any && (entry == NULL || PyList_Append(intervals, entry) < 0)) {
            Py_CLEAR(intervals);
        }
        Py_XDECREF(entry);
    }
    return intervals;
}

/* Add seconds by state up to `now`, the open interval included and what came after `now` not. */
static void add_states(const StateClock *self, double now, double *state_s) {
    for (int state = 0; state < self->num_states; state++) {
        state_s[state] += self->state_s[state];
    }
    if (self->since_s <= now) {
        state_s[self->open_state] += now - self->since_s;
        return;
    }
    /* The worker has continued since `now`, while the reader may have waited for the GIL. */
    double from_s, to_s;
    int state, is_any;
    for (long back = 0; (is_any = entry_of(self, back, now, self->since_s, &state, &from_s, &to_s)) >= 0; back++) {
        state_s[state] -= is_any ? to_s - from_s : 0.0;
    }
}

/* Add what was done in every stage, with the CPU time of the open interval. */
static void add_totals(const StateClock *self, Totals *totals) {
    for (int stage = 0; stage < self->num_stages; stage++) {
        const Totals *more = &self->totals[stage];
        totals[stage].num_items += more->num_items;
        totals[stage].num_bytes += more->num_bytes;
        totals[stage].num_failed += more->num_failed;
        totals[stage].cpu_s += more->cpu_s;
        totals[stage].delayed_s += more->delayed_s;
        for (int bucket = 0; bucket < NUM_BUCKETS && more->num_items; bucket++) {
            totals[stage].services[bucket] += more->services[bucket];
        }
    }
    if (self->open_state < self->num_stages && self->has_cpu_clock) { /* of a thread that has just ended there is none any more */
        totals[self->open_state].cpu_s += fmax(0.0, seconds_of(self->cpu_clock) - self->cpu_since_s);
    }
}

static PyObject *list_of(const double *values, int count) {
    PyObject *numbers = PyList_New(count);
    for (int i = 0; i < count && numbers != NULL; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
        if (value == NULL) {
            Py_CLEAR(numbers);
        } else {
            PyList_SET_ITEM(numbers, i, value);
        }
    }
    return numbers;
}

static PyObject *services_of(const Totals *totals) {
    PyObject *counts = PyDict_New();
    for (long bucket = 0; bucket < NUM_BUCKETS && counts != NULL; bucket++) {
        if (totals->services[bucket]) {
            PyObject *key = PyLong_FromLong(bucket), *count = PyLong_FromLongLong(totals->services[bucket]);
            if (key == NULL || count == NULL || PyDict_SetItem(counts, key, count) < 0) {
                Py_CLEAR(counts);
            }
            Py_XDECREF(key);
            Py_XDECREF(count);
        }
    }
    return counts;
}

/* The totals of every stage, each as a tuple. */
static PyObject *rows_of(const Totals *totals, int num_stages) {
    PyObject *rows = PyList_New(num_stages);
    for (int i = 0; i < num_stages && rows != NULL; i++) {
        PyObject *services = services_of(&totals[i]);
        PyObject *row = services == NULL ? NULL : Py_BuildValue(
            "(LLLddN)", totals[i].num_items, totals[i].num_bytes, totals[i].num_failed, totals[i].cpu_s, totals[i].delayed_s, services);
        if (row == NULL) {
            Py_CLEAR(rows);
        } else {
            PyList_SET_ITEM(rows, i, row);
        }
    }
    return rows;
}

/* The sums over several clocks in one call: for 64 workers they take, in Python, several times as long as the rest of `stats()`. */
static PyObject *summed(PyObject *type, PyObject *args) {
    PyObject *clocks;
    double now;
    if (!PyArg_ParseTuple(args, "O!d", &PyList_Type, &clocks, &now)) {
        return NULL;
    }
    const StateClock *first = NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(clocks); i++) {
        PyObject *object = PyList_GET_ITEM(clocks, i);
        const StateClock *one = PyObject_TypeCheck(object, (PyTypeObject *)type) ? (const StateClock *)object : NULL;
        first = i == 0 ? one : first;
        if (one == NULL || one->state_s == NULL || one->num_stages != first->num_stages || one->num_states != first->num_states) {
            PyErr_SetString(PyExc_ValueError, "only clocks of the same stages can be summed");
            return NULL;
        }
    }
    if (first == NULL) {
        PyErr_SetString(PyExc_ValueError, "there are no clocks to sum");
        return NULL;
    }
    const int num_stages = first->num_stages, num_states = first->num_states;
    Totals *totals = PyMem_Calloc((size_t)num_stages, sizeof(Totals));
    double *state_s = PyMem_Calloc((size_t)num_states, sizeof(double));
    PyObject *sums = NULL;
    if (totals == NULL || state_s == NULL) {
        PyErr_NoMemory();
    } else {
        /* Nothing in here lets another thread change the list, or a clock. */
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(clocks); i++) {
            const StateClock *one = (const StateClock *)PyList_GET_ITEM(clocks, i);
            add_states(one, now, state_s);
            add_totals(one, totals);
        }
        PyObject *times = list_of(state_s, num_states), *rows = times == NULL ? NULL : rows_of(totals, num_stages);
        sums = rows == NULL ? NULL : PyTuple_Pack(2, times, rows);
        Py_XDECREF(times);
        Py_XDECREF(rows);
    }
    PyMem_Free(totals);
    PyMem_Free(state_s);
    return sums;
}

static int init(StateClock *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"num_stages", "num_states", "clock", "first_state", "since_s", "slow_items", NULL};
    PyObject *clock, *slow_items;
    int num_stages, num_states, first_state;
    double since_s;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiOidO", names, &num_stages, &num_states, &clock, &first_state, &since_s, &slow_items)) {
        return -1;
    }
    if (self->totals != NULL || num_stages < 1 || num_states < num_stages || first_state < 0 || first_state >= num_states) {
        PyErr_SetString(PyExc_ValueError, "a clock has stages, states, one of them to begin with, and is made once");
        return -1;
    }
    PyObject *times = PyImport_ImportModule("time"), *usual = times == NULL ? NULL : PyObject_GetAttrString(times, "perf_counter");
    self->least_s = usual == NULL ? NULL : PyObject_GetAttrString(slow_items, "least_s");
    self->totals = PyMem_Calloc((size_t)num_stages, sizeof(Totals));
    self->state_s = PyMem_Calloc((size_t)num_states, sizeof(double));
    if (self->totals == NULL || self->state_s == NULL) {
        PyErr_NoMemory();
    } else if (self->least_s != NULL && (!PyList_Check(self->least_s) || PyList_GET_SIZE(self->least_s) != num_stages)) {
        PyErr_SetString(PyExc_ValueError, "slow_items.least_s must have a number for every stage");
    }
#ifdef __linux__
    const int is_usual = clock == usual;
#else
    const int is_usual = 0; /* another clock there */
#endif
    Py_XDECREF(times);
    Py_XDECREF(usual);
    if (PyErr_Occurred()) {
        return -1;
    }
    self->clock = is_usual ? NULL : Py_NewRef(clock);
    self->slow_items = Py_NewRef(slow_items);
    self->num_stages = num_stages;
    self->num_states = num_states;
    self->open_state = first_state;
    self->since_s = since_s;
    mark(self, since_s, first_state);
    return 0;
}

static int traverse(StateClock *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->clock);
    Py_VISIT(self->trace);
    Py_VISIT(self->item);
    Py_VISIT(self->slow_items);
    Py_VISIT(self->least_s);
    return 0;
}

static int clear(StateClock *self) {
    Py_CLEAR(self->clock);
    Py_CLEAR(self->trace);
    Py_CLEAR(self->item);
    Py_CLEAR(self->slow_items);
    Py_CLEAR(self->least_s);
    return 0;
}

static void dealloc(StateClock *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    clear(self);
    PyMem_Free(self->totals);
    PyMem_Free(self->state_s);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef state_clock_methods[] = {
    {"enter", (PyCFunction)enter, METH_O, "enter(state) -> the time"},
    {"served", (PyCFunction)(void (*)(void))served, METH_FASTCALL, "served(stage, num_items, num_bytes, chunk=None)"},
    {"failed", (PyCFunction)failed, METH_VARARGS, "failed(stage, count)"},
    {"timeline", (PyCFunction)timeline, METH_VARARGS, "timeline(start_s, end_s) -> list of (state, since, until)"},
    {"summed", (PyCFunction)summed, METH_VARARGS | METH_CLASS,
     "summed(clocks, now) -> list of s by state, list of (num_items, num_bytes, num_failed, cpu_s, delayed_s, services) by stage"},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef state_clock_members[] = {
    {"num_stages", T_INT, offsetof(StateClock, num_stages), READONLY, NULL},
    {"open_state", T_INT, offsetof(StateClock, open_state), READONLY, NULL},
    {"since_s", T_DOUBLE, offsetof(StateClock, since_s), READONLY, NULL},
    {"trace", T_OBJECT, offsetof(StateClock, trace), 0, NULL},
    {"item", T_OBJECT, offsetof(StateClock, item), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot state_clock_slots[] = {
    {Py_tp_doc, "One worker's time by state."},
    {Py_tp_init, init},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_methods, state_clock_methods},
    {Py_tp_members, state_clock_members},
    {0, NULL},
};

PyType_Spec state_clock_spec = {
    "loaderkit.native._kernels.StateClock", sizeof(StateClock), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, state_clock_slots,
};
