/* Where a random resized crop lies: the same arithmetic as in `loaderkit/stages/geometry.py`, to the last bit. */
#include "kernels.h"
#include <math.h>

#define TRIES 10

typedef struct {
    double low, high;
} Bounds;

/* (top, left, height, width); `draws` are the areas of ten tries, their ratios, and the place from the top and the left. */
static void find(const Py_ssize_t size[2], Bounds scale, Bounds ratio, const double *draws, Py_ssize_t box[4]) {
    const double height = (double)size[0], width = (double)size[1];
    const double log_low = log(ratio.low), log_high = log(ratio.high);
    for (int i = 0; i < TRIES; i++) {
        const double area = (double)(size[0] * size[1]) * (scale.low + draws[i] * (scale.high - scale.low));
        const double aspect = exp(log_low + draws[TRIES + i] * (log_high - log_low));
        const double w = rint(sqrt(area * aspect)), h = rint(sqrt(area / aspect));
        if (w > 0 && w <= width && h > 0 && h <= height) {
            box[0] = (Py_ssize_t)(draws[2 * TRIES] * (height - h + 1));
            box[1] = (Py_ssize_t)(draws[2 * TRIES + 1] * (width - w + 1));
            box[2] = (Py_ssize_t)h;
            box[3] = (Py_ssize_t)w;
            return;
        }
    }
    box[2] = size[0];
    box[3] = size[1];
    if (width / height < ratio.low) {
        box[2] = (Py_ssize_t)fmin(height, fmax(1, rint(width / ratio.low)));
    } else if (width / height > ratio.high) {
        box[3] = (Py_ssize_t)fmin(width, fmax(1, rint(height * ratio.high)));
    }
    box[0] = (size[0] - box[2]) / 2;
    box[1] = (size[1] - box[3]) / 2;
}

/* crop_box(height, width, scale, ratio, draws) -> (top, left, height, width); `draws` are float64 [22]. */
PyObject *crop_box(PyObject *self, PyObject *args) {
    Py_ssize_t size[2], box[4], step;
    Bounds scale, ratio;
    PyObject *object;
    Py_buffer draws;
    (void)self;
    if (!PyArg_ParseTuple(args, "nn(dd)(dd)O", &size[0], &size[1], &scale.low, &scale.high, &ratio.low, &ratio.high, &object) ||
        get_column(object, &draws, 2 * TRIES + 2, 0, &step) < 0) {
        return NULL;
    }
    if (step == 0 || size[0] < 1 || size[1] < 1) {
        PyBuffer_Release(&draws);
        PyErr_SetString(PyExc_ValueError, "a picture has pixels, and a crop 22 draws");
        return NULL;
    }
    find(size, scale, ratio, draws.buf, box);
    PyBuffer_Release(&draws);
    return Py_BuildValue("(nnnn)", box[0], box[1], box[2], box[3]);
}
