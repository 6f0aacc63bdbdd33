/* Small tensors, many at a time, by the C functions that a type of tensors offers through DLPack (1.2 and later,
 * https://dmlc.github.io/dlpack/latest/python_spec.html). Of its structures only what is asked for has a telling name. */
#include "kernels.h"
#include <string.h>

#define CPU 1
#define MOST_BYTES 4096 /* of a row; what is longer is not copied with the GIL held */

enum { INTEGER, UNSIGNED, FLOAT, OPAQUE, BFLOAT, COMPLEX, BOOLEAN };

typedef struct {
    void *data;
    int32_t device, device_number;
    int32_t num_dimensions;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t offset;
} View;

typedef struct {
    uint32_t major, minor;
    void *older;
    void *allocate, *to_owned, *from_owned;
    int (*view)(void *object, View *view);
    void *stream;
} Exchange;

/* Whether it is seen, and lies in C's order without gaps. */
static int is_dense(const Exchange *exchange, PyObject *object, View *view) {
    if (exchange->view(object, view) != 0) {
        PyErr_Clear(); /* sparse, say: no memory to look at */
        return 0;
    }
    int64_t step = 1;
    for (int i = view->num_dimensions - 1; i >= 0; i--) {
        if (view->strides[i] != step) {
            return 0;
        }
        step *= view->shape[i];
    }
    return view->device == CPU && view->lanes == 1 && view->bits % 8 == 0 && view->code != COMPLEX && view->data != NULL;
}

/* Whether the memory is what it says: the imaginary parts of conjugate numbers are kept with the wrong sign, of which DLPack
 * knows nothing. */
static int is_plain(PyObject *is_neg, PyObject *object, const View *view) {
    if (view->code != FLOAT) {
        return 1;
    }
    PyObject *answer = PyObject_CallOneArg(is_neg, object);
    if (answer == NULL) {
        PyErr_Clear();
        return 0;
    }
    Py_DECREF(answer);
    return answer == Py_False;
}

/* stack(exchange, is_neg, values, target, first) -> whether `values` were written into `target` from its row `first` on. They
 * are if all are of target's very type and fit: small, dense, on the CPU, of a row's shape and dtype. If one does not, those
 * before it may have been written. */
PyObject *stack(PyObject *self, PyObject *args) {
    PyObject *capsule, *is_neg, *values, *target;
    Py_ssize_t first;
    View rows, row;
    (void)self;
    if (!PyArg_ParseTuple(args, "OOO!On", &capsule, &is_neg, &PyList_Type, &values, &target, &first)) {
        return NULL;
    }
    const Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (exchange == NULL) {
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(values);
    if (exchange->major != 1 || exchange->view == NULL || !is_dense(exchange, target, &rows) || rows.num_dimensions < 1 ||
        first < 0 || first > rows.shape[0] - count) {
        Py_RETURN_FALSE;
    }
    const size_t dimensions = (size_t)rows.num_dimensions - 1;
    size_t size = rows.bits / 8;
    for (size_t i = 1; i <= dimensions; i++) {
        size *= (size_t)rows.shape[i];
    }
    char *to = (char *)rows.data + rows.offset + (size_t)first * size;
    int fits = size <= MOST_BYTES;
    Py_ssize_t i = 0;
    for (; fits && i < count && i < PyList_GET_SIZE(values); i++) {
        PyObject *value = Py_NewRef(PyList_GET_ITEM(values, i));
        fits = Py_TYPE(value) == Py_TYPE(target) && is_dense(exchange, value, &row) && row.code == rows.code &&
               row.bits == rows.bits && (size_t)row.num_dimensions == dimensions &&
               (dimensions == 0 || memcmp(row.shape, rows.shape + 1, dimensions * sizeof(int64_t)) == 0) &&
               is_plain(is_neg, value, &row);
        if (fits) {
            memcpy(to + (size_t)i * size, (const char *)row.data + row.offset, size);
        }
        Py_DECREF(value);
    }
    return PyBool_FromLong(fits && i == count); /* is_neg might let others run, who have the list as well */
}
