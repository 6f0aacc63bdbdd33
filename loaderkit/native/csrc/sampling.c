/* Wakes the thread that samples the main one, and has the main thread sample itself where it computes.
 *
 * A sampling thread gets the GIL where the main thread lets go of it: at a read, a decoder, a sleep; or 5 ms later. Python code
 * that runs for less than that before such a call would never be seen, and its time would be charged to the call. So a main
 * thread that runs gets a signal before this one waits for the GIL, and samples when its bytecode next looks for signals: at the
 * end of a call, at a jump back. Whichever comes first samples. An operator that holds the GIL is still charged to the next call.
 * A thread that sleeps in a system call gets none, so that no call is interrupted. Py_AddPendingCall would do the same without
 * a signal, but up to Python 3.12 the main thread is not told of it by other threads. */
#include "kernels.h"

#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

static atomic_int is_due;

/* True if the thread whose /proc/.../stat this is runs, or is ready to. */
static int runs(int stat_file) {
    char text[512];
    const ssize_t length = pread(stat_file, text, sizeof text - 1, 0);
    text[length > 0 ? length : 0] = 0;
    const char *end = strrchr(text, ')'); /* of its name */
    return end != NULL && end[1] == ' ' && end[2] == 'R';
}

PyObject *wait_to_sample(PyObject *self, PyObject *args) {
    (void)self;
    double sleep_s;
    int stat_file, signal_number;
    unsigned long thread;
    if (!PyArg_ParseTuple(args, "dkii", &sleep_s, &thread, &stat_file, &signal_number)) {
        return NULL;
    }
    if (!(sleep_s >= 0.0 && sleep_s < 1.0)) {
        return PyErr_Format(PyExc_ValueError, "a sleep is shorter than 1 s");
    }
    const struct timespec sleep = {0, (long)(sleep_s * 1e9)};
    Py_BEGIN_ALLOW_THREADS;
    nanosleep(&sleep, NULL);
    atomic_store(&is_due, 1);
    if (signal_number && Py_IsInitialized() && runs(stat_file)) {
        pthread_kill((pthread_t)thread, signal_number);
    }
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(atomic_exchange(&is_due, 0));
}

PyObject *take_sample(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyBool_FromLong(atomic_exchange(&is_due, 0));
}
