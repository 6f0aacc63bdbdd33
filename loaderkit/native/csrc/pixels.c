/* Writes pixels into slots: split into planes, mirrored, scaled. */
#include "kernels.h"

#include <string.h>

#define TILE 512 /* pixels split at a time: 3 planes of them stay in the first-level cache */

static inline __attribute__((always_inline)) void split_any(const uint8_t *restrict row, uint8_t planes[restrict 3][TILE],
                                                            Py_ssize_t count) {
    for (Py_ssize_t x = 0; x < count; x++) {
        planes[0][x] = row[3 * x];
        planes[1][x] = row[3 * x + 1];
        planes[2][x] = row[3 * x + 2];
    }
}

static void scale_plain(const uint8_t *from, float *to, Py_ssize_t count, float scale, float shift) {
    for (Py_ssize_t x = 0; x < count; x++) {
        to[x] = (float)from[x] * scale + shift;
    }
}

#ifdef HAVE_AVX2
/* The same lines, compiled to byte shuffles: a third of the time. */
__attribute__((target("avx2"))) static void split_avx2(const uint8_t *row, uint8_t planes[3][TILE], Py_ssize_t count) {
    split_any(row, planes, count);
}

__attribute__((target("avx2"))) static void scale_avx2(const uint8_t *from, float *to, Py_ssize_t count, float scale,
                                                       float shift) {
    const __m256 factor = _mm256_set1_ps(scale), summand = _mm256_set1_ps(shift);
    const int aligned = ((uintptr_t)to & 31) == 0;
    Py_ssize_t x = 0;
    for (; x + 8 <= count; x += 8) {
        const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from + x)));
        const __m256 value = _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(wide), factor), summand);
        if (aligned) {
            _mm256_stream_ps(to + x, value);
        } else {
            _mm256_storeu_ps(to + x, value);
        }
    }
    scale_plain(from + x, to + x, count - x, scale, shift);
}

__attribute__((target("avx2"))) static Py_ssize_t mirror_avx2(const uint8_t *row, uint8_t *to, Py_ssize_t width) {
    /* Five pixels a step. 16 bytes are read, the first of the neighbour before them, and 16 are written, the last of which
     * is written again by the next step. Returns how many pixels are done. */
    const __m128i order = _mm_setr_epi8(13, 14, 15, 10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3, 0);
    Py_ssize_t done = 0;
    for (; done + 6 <= width; done += 5) {
        const __m128i pixels = _mm_loadu_si128((const __m128i *)(row + 3 * (width - done - 5) - 1));
        _mm_storeu_si128((__m128i *)(to + 3 * done), _mm_shuffle_epi8(pixels, order));
    }
    return done;
}
#endif

static void split(const uint8_t *row, uint8_t planes[3][TILE], Py_ssize_t count, int wide) {
#ifdef HAVE_AVX2
    if (wide) {
        split_avx2(row, planes, count);
        return;
    }
#endif
    (void)wide;
    split_any(row, planes, count);
}

static void mirror_row(const uint8_t *row, uint8_t *to, Py_ssize_t width, int wide) {
    Py_ssize_t x = 0;
#ifdef HAVE_AVX2
    if (wide) {
        x = mirror_avx2(row, to, width);
    }
#endif
    (void)wide;
    for (; x < width; x++) {
        memcpy(to + 3 * x, row + 3 * (width - 1 - x), 3);
    }
}

int get_pixels(PyObject *object, Py_buffer *view, int may_be_mirrored) {
    if (PyObject_GetBuffer(object, view, PyBUF_STRIDES | PyBUF_FORMAT) < 0) {
        return -1;
    }
    if (view->ndim != 3 || view->itemsize != 1 || view->shape[2] != 3 || view->strides[2] != 1 ||
        (view->strides[1] != 3 && !(may_be_mirrored && view->strides[1] == -3))) {
        PyErr_SetString(PyExc_ValueError, "pixels must be uint8 [H, W, 3] with packed rows");
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static int get_slots(PyObject *object, Py_buffer *view, const char *format, Py_ssize_t slot, const Py_buffer *pixels) {
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) < 0) {
        return -1;
    }
    if (view->ndim != 4 || view->format == NULL || strcmp(view->format, format) != 0 || view->shape[1] != 3 ||
        view->shape[2] != pixels->shape[0] || view->shape[3] != pixels->shape[1] || slot < 0 || slot >= view->shape[0]) {
        PyErr_SetString(PyExc_ValueError, "slots must be [B, 3, H, W] of the right type and of the pixels' size");
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

/* Pixels [x, x + count) of row y, packed: in place, or copied to `spare` if the row runs backwards. */
static const uint8_t *tile_of(const Py_buffer *pixels, Py_ssize_t y, Py_ssize_t x, Py_ssize_t count, uint8_t *spare, int wide) {
    const uint8_t *row = (const uint8_t *)pixels->buf + y * pixels->strides[0];
    if (pixels->strides[1] > 0) {
        return row + 3 * x;
    }
    mirror_row(row - 3 * (x + count - 1), spare, count, wide);
    return spare;
}

static void normalize_one(const Py_buffer *pixels, float *target, const float *scale, const float *shift, int wide) {
    const Py_ssize_t height = pixels->shape[0], width = pixels->shape[1];
    uint8_t planes[3][TILE], spare[3 * TILE];
    for (Py_ssize_t y = 0; y < height; y++) {
        for (Py_ssize_t x = 0; x < width; x += TILE) {
            const Py_ssize_t count = width - x < TILE ? width - x : TILE;
            split(tile_of(pixels, y, x, count, spare, wide), planes, count, wide);
            for (int c = 0; c < 3; c++) {
                float *to = target + (c * height + y) * width + x;
#ifdef HAVE_AVX2
                if (wide) {
                    scale_avx2(planes[c], to, count, scale[c], shift[c]);
                    continue;
                }
#endif
                scale_plain(planes[c], to, count, scale[c], shift[c]);
            }
        }
    }
}

PyObject *write_normalized(PyObject *self, PyObject *args) {
    PyObject *slots_object, *images_object;
    Py_ssize_t first;
    float scale[3], shift[3];
    (void)self;
    if (!PyArg_ParseTuple(args, "OnO!(fff)(fff)", &slots_object, &first, &PyList_Type, &images_object, &scale[0], &scale[1],
                          &scale[2], &shift[0], &shift[1], &shift[2])) {
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(images_object);
    Py_buffer slots = {0}, *images = PyMem_Calloc(count ? (size_t)count : 1, sizeof(Py_buffer));
    int failed = images == NULL;
    if (failed) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        PyObject *pixels = PyList_GET_ITEM(images_object, i);
        if (pixels == Py_None) {
            continue;
        }
        failed = get_pixels(pixels, &images[i], 1) < 0;
        if (!failed) {
            PyBuffer_Release(&slots);
            failed = get_slots(slots_object, &slots, "f", first + i, &images[i]) < 0;
        }
    }
    if (!failed && slots.obj != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        const int wide = have_avx2();
        const Py_ssize_t stride = slots.shape[1] * slots.shape[2] * slots.shape[3];
        for (Py_ssize_t i = 0; i < count; i++) {
            if (images[i].obj != NULL) {
                normalize_one(&images[i], (float *)slots.buf + (first + i) * stride, scale, shift, wide);
            }
        }
#ifdef HAVE_AVX2
        _mm_sfence(); /* a thread that learns that the slots are full must see the stores */
#endif
        Py_END_ALLOW_THREADS;
    }
    for (Py_ssize_t i = 0; i < count && images != NULL; i++) {
        PyBuffer_Release(&images[i]);
    }
    PyBuffer_Release(&slots);
    PyMem_Free(images);
    if (failed) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyObject *write_planes(PyObject *self, PyObject *args) {
    PyObject *slots_object, *pixels_object;
    Py_ssize_t slot;
    Py_buffer slots, pixels;
    (void)self;
    if (!PyArg_ParseTuple(args, "OnO", &slots_object, &slot, &pixels_object) ||
        get_pixels(pixels_object, &pixels, 1) < 0) {
        return NULL;
    }
    if (get_slots(slots_object, &slots, "B", slot, &pixels) < 0) {
        PyBuffer_Release(&pixels);
        return NULL;
    }
    const Py_ssize_t height = pixels.shape[0], width = pixels.shape[1];
    uint8_t *target = (uint8_t *)slots.buf + slot * 3 * height * width;
    const int wide = have_avx2();
    uint8_t planes[3][TILE], spare[3 * TILE];
    for (Py_ssize_t y = 0; y < height; y++) {
        for (Py_ssize_t x = 0; x < width; x += TILE) {
            const Py_ssize_t count = width - x < TILE ? width - x : TILE;
            split(tile_of(&pixels, y, x, count, spare, wide), planes, count, wide);
            for (int c = 0; c < 3; c++) {
                memcpy(target + (c * height + y) * width + x, planes[c], (size_t)count);
            }
        }
    }
    PyBuffer_Release(&slots);
    PyBuffer_Release(&pixels);
    Py_RETURN_NONE;
}
