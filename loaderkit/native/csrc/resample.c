/* The antialiased bilinear filter as Pillow defines it (Image.resize, reducing_gap none): a triangle as wide as the scale,
 * cut at the borders, its weights summing to one. Here in 14 bits, each output row first down the columns into one row of
 * bytes, then along it: the source is read once, and what is between the two passes stays in the first-level cache.
 */
#include "kernels.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef HAVE_AVX2
#define WEIGHT_BITS 14

typedef struct {
    Py_ssize_t first; /* of the source, for one target pixel */
    Py_ssize_t pairs; /* weights come in pairs; an odd one is followed by a zero */
} Reach;

/* The part [start, start + extent) of `in` pixels becomes `out` pixels. */
typedef struct {
    Py_ssize_t in, out;
    double start, extent;
} Span;

/* Room for the weights of one target pixel; even. */
static Py_ssize_t most_weights(const Span *span) {
    return 2 * ((Py_ssize_t)(span->extent / (double)span->out) + 3);
}

/* Fills `reach` [out] and `weights` [out][most]. Without antialiasing the filter is two pixels wide whatever the scale. */
static void filter_weights(const Span *span, int antialias, Reach *reach, int16_t *weights, Py_ssize_t most) {
    const Py_ssize_t in = span->in;
    const double scale = span->extent / (double)span->out, width = scale < 1.0 || !antialias ? 1.0 : scale;
    for (Py_ssize_t x = 0; x < span->out; x++) {
        const double center = span->start + ((double)x + 0.5) * scale;
        Py_ssize_t first = (Py_ssize_t)(center - width + 0.5), last = (Py_ssize_t)(center + width + 0.5);
        first = center - width + 0.5 < 0 ? 0 : first;
        last = last > in ? in : last;
        int16_t *row = weights + x * most;
        double sum = 0;
        for (Py_ssize_t k = first; k < last; k++) {
            const double distance = fabs(((double)k - center + 0.5) / width);
            sum += distance < 1.0 ? 1.0 - distance : 0.0;
        }
        int left = 1 << WEIGHT_BITS;
        Py_ssize_t heaviest = 0;
        for (Py_ssize_t k = first; k < last; k++) {
            const double distance = fabs(((double)k - center + 0.5) / width);
            const double share = (distance < 1.0 ? 1.0 - distance : 0.0) / sum;
            row[k - first] = (int16_t)(share * (1 << WEIGHT_BITS) + 0.5);
            left -= row[k - first];
            heaviest = row[k - first] > row[heaviest] ? k - first : heaviest;
        }
        row[heaviest] = (int16_t)(row[heaviest] + left); /* what rounding left over: a plain picture stays plain */
        if ((last - first) & 1) {
            row[last - first] = 0;
        }
        reach[x].first = first;
        reach[x].pairs = (last - first + 1) / 2;
    }
}

/* 16 bytes of `taps` rows, weighted and summed, two rows a multiplication. */
static inline __attribute__((always_inline, target("avx2"))) __m128i blend_16(const uint8_t *from, Py_ssize_t stride,
                                                                              const int16_t *weights, Py_ssize_t taps) {
    __m256i low = _mm256_set1_epi32(1 << (WEIGHT_BITS - 1)), high = low;
    Py_ssize_t k = 0;
    for (; k + 1 < taps; k += 2, from += 2 * stride) {
        const __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)(from + stride));
        int32_t two;
        memcpy(&two, weights + k, sizeof two);
        const __m256i pair = _mm256_set1_epi32(two);
        low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), pair));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)), pair));
    }
    if (k < taps) {
        const __m128i a = _mm_loadu_si128((const __m128i *)from), zero = _mm_setzero_si128();
        const __m256i pair = _mm256_set1_epi32((int)(uint16_t)weights[k]);
        low = _mm256_add_epi32(low, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, zero)), pair));
        high = _mm256_add_epi32(high, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, zero)), pair));
    }
    __m256i words = _mm256_packs_epi32(_mm256_srai_epi32(low, WEIGHT_BITS), _mm256_srai_epi32(high, WEIGHT_BITS));
    words = _mm256_permute4x64_epi64(words, 0xD8);
    return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}

__attribute__((target("avx2"))) static void blend_rows(const uint8_t *source, Py_ssize_t stride, Py_ssize_t count,
                                                       const int16_t *weights, Py_ssize_t taps, uint8_t *to) {
    Py_ssize_t x = 0;
    if (taps <= 2) {
        for (; x + 16 <= count; x += 16) {
            _mm_storeu_si128((__m128i *)(to + x), blend_16(source + x, stride, weights, taps));
        }
    } else if (taps <= 4) { /* the usual reaches, unrolled */
        for (; taps == 3 && x + 16 <= count; x += 16) {
            _mm_storeu_si128((__m128i *)(to + x), blend_16(source + x, stride, weights, 3));
        }
        for (; x + 16 <= count; x += 16) {
            _mm_storeu_si128((__m128i *)(to + x), blend_16(source + x, stride, weights, 4));
        }
    } else {
        for (; x + 16 <= count; x += 16) {
            _mm_storeu_si128((__m128i *)(to + x), blend_16(source + x, stride, weights, taps));
        }
    }
    for (; x < count; x++) {
        int sum = 1 << (WEIGHT_BITS - 1);
        for (Py_ssize_t k = 0; k < taps; k++) {
            sum += weights[k] * source[k * stride + x];
        }
        sum >>= WEIGHT_BITS;
        to[x] = (uint8_t)(sum < 0 ? 0 : sum > 255 ? 255 : sum);
    }
}

/* One pixel of two rows, one in each half of the registers. */
static inline __attribute__((always_inline, target("avx2"))) __m256i blend_pixel(const uint8_t *upper, const uint8_t *lower,
                                                                                 const int16_t *weight, Py_ssize_t pairs) {
    /* Two neighbouring pixels as 16-bit r0 r1 g0 g1 b0 b1 0 0, so that one multiplication adds both of each channel. */
    const __m256i order = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1));
    __m256i sum = _mm256_set1_epi32(1 << (WEIGHT_BITS - 1));
    for (Py_ssize_t k = 0; k < pairs; k++) {
        const __m256i pixels = _mm256_inserti128_si256(
            _mm256_castsi128_si256(_mm_loadl_epi64((const __m128i *)(upper + 6 * k))),
            _mm_loadl_epi64((const __m128i *)(lower + 6 * k)), 1);
        int32_t two;
        memcpy(&two, weight + 2 * k, sizeof two);
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_shuffle_epi8(pixels, order), _mm256_set1_epi32(two)));
    }
    return _mm256_srai_epi32(sum, WEIGHT_BITS);
}

/* Two rows at once. Two bytes past each pixel are read, and one past it is written, but for the last pixel of a row. */
__attribute__((target("avx2"))) static void blend_along(const uint8_t *upper, const uint8_t *lower, Py_ssize_t out,
                                                        const Reach *reach, const int16_t *weights, Py_ssize_t most,
                                                        uint8_t *to_upper, uint8_t *to_lower) {
    for (Py_ssize_t x = 0; x < out; x++) {
        const Py_ssize_t first = 3 * reach[x].first, pairs = reach[x].pairs;
        const int16_t *weight = weights + x * most;
        __m256i sum;
        if (pairs == 2) {
            sum = blend_pixel(upper + first, lower + first, weight, 2);
        } else if (pairs == 1) {
            sum = blend_pixel(upper + first, lower + first, weight, 1);
        } else {
            sum = blend_pixel(upper + first, lower + first, weight, pairs);
        }
        sum = _mm256_packus_epi16(_mm256_packs_epi32(sum, sum), sum);
        const int32_t rgb_upper = _mm_cvtsi128_si32(_mm256_castsi256_si128(sum));
        const int32_t rgb_lower = _mm_cvtsi128_si32(_mm256_extracti128_si256(sum, 1));
        const size_t size = x + 1 < out ? 4 : 3;
        memcpy(to_upper + 3 * x, &rgb_upper, size);
        memcpy(to_lower + 3 * x, &rgb_lower, size);
    }
}

static int resample_avx2(const Py_buffer *pixels, uint8_t *target, const Span *down, const Span *along, int antialias) {
    const Py_ssize_t in_height = down->in, in_width = along->in, stride = pixels->strides[0];
    const Py_ssize_t height = down->out, width = along->out;
    const Py_ssize_t most_down = most_weights(down), most_along = most_weights(along);
    Reach *reach = malloc((size_t)(height + width) * sizeof(Reach));
    int16_t *weights = malloc((size_t)(height * most_down + width * most_along) * sizeof(int16_t));
    const Py_ssize_t row_size = 3 * in_width + 32;
    uint8_t *row = calloc((size_t)(2 * row_size), 1);
    const int fits = reach != NULL && weights != NULL && row != NULL;
    if (fits) {
        int16_t *weights_along = weights + height * most_down;
        filter_weights(down, antialias, reach, weights, most_down);
        filter_weights(along, antialias, reach + height, weights_along, most_along);
        for (Py_ssize_t y = 0; y < height; y += 2) {
            const Py_ssize_t rows = y + 1 < height ? 2 : 1;
            for (Py_ssize_t i = y; i < y + rows; i++) {
                const Py_ssize_t below = in_height - reach[i].first; /* an odd tap's zero may lie past the last row */
                const Py_ssize_t taps = 2 * reach[i].pairs < below ? 2 * reach[i].pairs : below;
                blend_rows((const uint8_t *)pixels->buf + reach[i].first * stride, stride, 3 * in_width,
                           weights + i * most_down, taps, row + (i - y) * row_size);
            }
            uint8_t *to = target + 3 * y * width; /* an odd last row is made twice */
            blend_along(row, row + (rows - 1) * row_size, width, reach + height, weights_along, most_along, to,
                        to + (rows - 1) * 3 * width);
        }
    }
    free(reach);
    free(weights);
    free(row);
    return fits;
}
#endif

typedef struct {
    Py_buffer target, pixels;
    Span down, along;
    int antialias;
} Job;

/* Fills a job from (target, pixels, None or (top, left, height, width), whether to antialias). */
static int get_job(PyObject *object, Job *job) {
    PyObject *target, *pixels, *part;
    if (!PyArg_ParseTuple(object, "OOOp", &target, &pixels, &part, &job->antialias) || get_pixels(pixels, &job->pixels, 0) < 0 ||
        PyObject_GetBuffer(target, &job->target, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | PyBUF_WRITABLE) < 0) {
        return -1;
    }
    const Py_buffer *to = &job->target, *from = &job->pixels;
    if (to->ndim != 3 || to->itemsize != 1 || to->shape[2] != 3 || to->len == 0 || from->len == 0) {
        PyErr_SetString(PyExc_ValueError, "the target must be uint8 [H, W, 3], and neither it nor the pixels empty");
        return -1;
    }
    Span *down = &job->down, *along = &job->along;
    *down = (Span){from->shape[0], to->shape[0], 0, (double)from->shape[0]};
    *along = (Span){from->shape[1], to->shape[1], 0, (double)from->shape[1]};
    if (part != Py_None &&
        !PyArg_ParseTuple(part, "dddd", &down->start, &along->start, &down->extent, &along->extent)) {
        return -1;
    }
    const Span *spans[2] = {down, along};
    for (int i = 0; i < 2; i++) {
        const Span *span = spans[i];
        if (!(span->start >= 0 && span->extent > 0 && span->start + span->extent <= (double)span->in)) {
            PyErr_SetString(PyExc_ValueError, "the part must be some of the pixels");
            return -1;
        }
    }
    return 0;
}

PyObject *resample(PyObject *self, PyObject *list) {
    (void)self;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "a list of (target, pixels, part, antialias) is wanted");
        return NULL;
    }
    if (!have_avx2()) {
        Py_RETURN_FALSE;
    }
    const Py_ssize_t count = PyList_GET_SIZE(list);
    Job *jobs = PyMem_Calloc(count ? (size_t)count : 1, sizeof(Job));
    if (jobs == NULL) {
        return PyErr_NoMemory();
    }
    int failed = 0, enough = 1;
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        failed = get_job(PyList_GET_ITEM(list, i), &jobs[i]) < 0;
    }
#ifdef HAVE_AVX2
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS;
        for (Py_ssize_t i = 0; i < count && enough; i++) {
            enough = resample_avx2(&jobs[i].pixels, jobs[i].target.buf, &jobs[i].down, &jobs[i].along, jobs[i].antialias);
        }
        Py_END_ALLOW_THREADS;
    }
#endif
    for (Py_ssize_t i = 0; i < count; i++) {
        PyBuffer_Release(&jobs[i].target);
        PyBuffer_Release(&jobs[i].pixels);
    }
    PyMem_Free(jobs);
    if (failed) {
        return NULL;
    }
    if (!enough) {
        return PyErr_NoMemory();
    }
    Py_RETURN_TRUE;
}
