/* Wakes the thread that samples the main one.
 *
 * A sampling thread gets the GIL where the main thread lets go of it: at a read, a decoder, a sleep; or 5 ms later. Python code
 * that runs for less than that before such a call would never be seen, and its time would be charged to the call. So the main
 * thread is asked, before this one waits for the GIL, to sample itself when its bytecode next looks for requests: at the end of
 * a call, at a jump back. Whichever comes first samples. An operator that holds the GIL is still charged to the next call. */
#include "kernels.h"

#include <stdatomic.h>
#include <time.h>

static PyObject *sample; /* written and called with the GIL */
static atomic_int is_due;

static int sample_main(void *unused) {
    (void)unused;
    if (!atomic_exchange(&is_due, 0) || sample == NULL) {
        return 0;
    }
    PyObject *call = Py_NewRef(sample), *done = PyObject_CallNoArgs(call);
    Py_DECREF(call);
    Py_XDECREF(done);
    if (done == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear(); /* the stack may be too deep for one call more; Ctrl-C is the script's */
    }
    return PyErr_Occurred() ? -1 : 0;
}

PyObject *wait_to_sample(PyObject *self, PyObject *args) {
    (void)self;
    double sleep_s;
    PyObject *callback;
    if (!PyArg_ParseTuple(args, "dO", &sleep_s, &callback)) {
        return NULL;
    }
    if (!(sleep_s >= 0.0 && sleep_s < 1.0)) {
        return PyErr_Format(PyExc_ValueError, "a sleep is shorter than 1 s");
    }
    Py_XSETREF(sample, Py_NewRef(callback));
    const struct timespec sleep = {0, (long)(sleep_s * 1e9)};
    Py_BEGIN_ALLOW_THREADS;
    nanosleep(&sleep, NULL);
    atomic_store(&is_due, 1);
    if (Py_IsInitialized()) { /* and not at its end, while this thread slept */
        Py_AddPendingCall(sample_main, NULL); /* if 32 others wait: this thread samples */
    }
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(atomic_exchange(&is_due, 0));
}
