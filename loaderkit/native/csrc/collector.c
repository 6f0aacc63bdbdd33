/* Python's cyclic garbage collector off while anybody is inside, in whatever thread. All of it happens under the GIL, without a
 * call in between: no lock that a collection, a destructor or a signal's handler could find taken, and nothing for Ctrl-C to
 * interrupt. */
#include "kernels.h"

static Py_ssize_t num_inside;
static int was_on;
static unsigned long generation; /* grows with every fork: who was inside before is nobody's in the child */

typedef struct {
    PyObject_HEAD
    unsigned long generation;
} Pause;

static PyObject *new_pause(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    if (PyTuple_GET_SIZE(args) || (kwargs != NULL && PyDict_GET_SIZE(kwargs))) {
        PyErr_SetString(PyExc_TypeError, "Pause() takes no arguments");
        return NULL;
    }
    Pause *self = (Pause *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->generation = generation;
        if (num_inside++ == 0) {
            was_on = PyGC_Disable();
        }
    }
    return (PyObject *)self;
}

static void leave(void) {
    if (--num_inside == 0 && was_on) {
        PyGC_Enable(); /* it looks when the next object is made */
    }
}

static void end_pause(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    if (((Pause *)object)->generation == generation) {
        leave();
    }
    type->tp_free(object);
    Py_DECREF(type);
}

/* forget_pauses(): in a fork's child, where the threads that were inside are not. */
PyObject *forget_pauses(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    generation++;
    if (num_inside) {
        num_inside = 1;
        leave();
    }
    Py_RETURN_NONE;
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "The collector is off as long as this lives."},
    {Py_tp_new, new_pause},
    {Py_tp_dealloc, end_pause},
    {0, NULL},
};

PyType_Spec pause_spec = {"loaderkit.native._kernels.Pause", sizeof(Pause), 0, Py_TPFLAGS_DEFAULT, slots};
