/* Moving bytes and pixels with few calls, each of which gives the GIL away at most once: with two busy threads every
 * exchange of the GIL costs tens of microseconds, and what takes 20 us alone is better done without one.
 *
 *     read_range(path, start, buffer)                        open, fstat, pread, close
 *     read_many(paths, starts, lengths, etags, offsets, buffer)   the same for many ranges, neighbours in one call
 *     cut(buffer, lengths)                                   the parts of a buffer as bytes
 *     tar_run(data, offset, end, size)                       the plain members of a piece of a tar
 *     jpeg_size(data)                                        what the frame header says
 *     gather_ranges(path, starts, length, buffer)            open, fstat, a pread for every run of adjacent ranges, close
 *     write_normalized(slots, first, images, scale, shift)   float32 planes, value * scale + shift; None is left out
 *     write_planes(slots, slot, pixels)                      uint8 planes
 *     mirror(target, pixels)                                 packed rows, left and right exchanged
 *     resample([(target, pixels, part), ...])                antialiased bilinear, where the CPU has AVX2
 *
 * Slots are C-contiguous [B, 3, H, W]; pixels are [H, W, 3] with packed rows any distance apart, and where pixels are
 * written to slots the rows may run backwards (a mirrored view). Multiplication and addition round separately, as torch's
 * do (the build forbids contraction), so that the result is the same to the last bit without this module. Float planes are written past the caches: a slab is larger than
 * they are, and reading its old content first would double the traffic (224 x 224: 35 to 45 us, against 200 to 240 in torch).
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_AVX2 1
#include <immintrin.h>
#endif

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

static int have_avx2(void) {
#ifdef HAVE_AVX2
    return __builtin_cpu_supports("avx2");
#else
    return 0;
#endif
}

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

/* ------------------------------------------------------------------------------------------------- Python's side */

static int get_pixels(PyObject *object, Py_buffer *view, int may_be_mirrored) {
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

/* Pixels [x, x + count) of row y, packed: where they lie, or in `spare` if the row runs backwards. */
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

static PyObject *write_normalized(PyObject *self, PyObject *args) {
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
        _mm_sfence(); /* whoever is told that the slots are full must see it */
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

static PyObject *write_planes(PyObject *self, PyObject *args) {
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

static PyObject *mirror(PyObject *self, PyObject *args) {
    PyObject *target_object, *pixels_object;
    Py_buffer target, pixels;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO", &target_object, &pixels_object) || get_pixels(pixels_object, &pixels, 0) < 0) {
        return NULL;
    }
    if (PyObject_GetBuffer(target_object, &target, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&pixels);
        return NULL;
    }
    const Py_ssize_t height = pixels.shape[0], width = pixels.shape[1];
    const int fits = target.len == 3 * height * width && target.buf != pixels.buf;
    if (fits) {
        const int wide = have_avx2();
        for (Py_ssize_t y = 0; y < height; y++) {
            mirror_row((const uint8_t *)pixels.buf + y * pixels.strides[0], (uint8_t *)target.buf + 3 * y * width, width,
                       wide);
        }
    }
    PyBuffer_Release(&target);
    PyBuffer_Release(&pixels);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "the target must have the pixels' size and be other memory");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Fill `to` with the bytes from `start` on; how many there were. -1: errno says why. */
static Py_ssize_t pread_all(int fd, char *to, Py_ssize_t length, long long start) {
    Py_ssize_t done = 0;
    while (done < length) {
        const ssize_t got = pread(fd, to + done, (size_t)(length - done), (off_t)(start + done));
        if (got == 0) {
            break;
        }
        if (got < 0 && errno != EINTR) {
            return -1;
        }
        done += got > 0 ? got : 0;
    }
    return done;
}

/* Ranges of `length` bytes, one behind another in `to`, until one is short; how many bytes there were. -1: errno says why.
 * A record of 16 bytes in the page cache costs 0.3 us; ranges that are neighbours in the file are read together. */
static Py_ssize_t pread_ranges(int fd, char *to, Py_ssize_t length, const int64_t *starts, Py_ssize_t count) {
    Py_ssize_t done = 0, i = 0;
    while (i < count && starts[i] >= 0) {
        Py_ssize_t run = 1;
        while (i + run < count && (uint64_t)starts[i + run] == (uint64_t)starts[i + run - 1] + (uint64_t)length) {
            run++;
        }
        const Py_ssize_t got = pread_all(fd, to + i * length, run * length, starts[i]);
        if (got < 0) {
            return -1;
        }
        done += got;
        if (got < run * length) {
            break;
        }
        i += run;
    }
    return done;
}

/* Open, look, read the ranges, close: (bytes read, mode, size, time of change in ns), or None with an OSError set. What is no
 * regular file is not read. `path` is given back. */
static PyObject *read_from(PyObject *path, char *to, Py_ssize_t length, const int64_t *starts, Py_ssize_t count) {
    struct stat status;
    Py_ssize_t done = 0;
    int error = 0;
    memset(&status, 0, sizeof status);
    Py_BEGIN_ALLOW_THREADS;
    /* Without O_NONBLOCK, opening a named pipe would wait for a writer for ever. */
    const int fd = open(PyBytes_AS_STRING(path), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &status) < 0) {
        error = errno;
    }
    if (error == 0 && S_ISREG(status.st_mode)) {
        done = pread_ranges(fd, to, length, starts, count);
        error = done < 0 ? errno : 0;
    }
    if (fd >= 0) {
        close(fd);
    }
    Py_END_ALLOW_THREADS;
    PyObject *result = NULL;
    if (error) {
        errno = error;
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    } else {
        const long long changed = (long long)status.st_mtim.tv_sec * 1000000000LL + status.st_mtim.tv_nsec;
        result = Py_BuildValue("(nILL)", done, (unsigned int)status.st_mode, (long long)status.st_size, changed);
    }
    Py_DECREF(path);
    return result;
}

/* One range of a file, and where its bytes go. Neighbours of one file share `path`. */
typedef struct {
    const char *path, *etag;
    long long start;
    Py_ssize_t length;
    char *to;
    int failed;
} Piece;

#define MOST_GAP 8192 /* bytes between two wanted ranges (headers and padding of a tar) that are cheaper read than skipped */
#define MOST_PARTS 256

static int is_as_listed(const struct stat *status, const char *etag) {
    char found[64];
    snprintf(found, sizeof found, "%llx-%llx",
             (unsigned long long)status->st_mtim.tv_sec * 1000000000ULL + (unsigned long long)status->st_mtim.tv_nsec,
             (unsigned long long)status->st_size);
    return etag == NULL || strcmp(found, etag) == 0;
}

/* How many pieces from the first on lie so close behind one another that one call reads them all. */
static Py_ssize_t run_length(const Piece *pieces, Py_ssize_t count) {
    Py_ssize_t n = 1;
    while (n < count && n < MOST_PARTS / 2 && pieces[n].path == pieces[0].path && pieces[n].etag == pieces[0].etag) {
        const long long gap = pieces[n].start - (pieces[n - 1].start + pieces[n - 1].length);
        if (gap < 0 || gap > MOST_GAP) {
            break;
        }
        n++;
    }
    return n;
}

/* Read `count` pieces of one open file that lie side by side; returns whether all bytes came. */
static int read_run(int fd, const Piece *pieces, Py_ssize_t count) {
    char gap[MOST_GAP];
    struct iovec parts[MOST_PARTS], *part = parts;
    int left = 0;
    long long at = pieces[0].start;
    for (Py_ssize_t i = 0; i < count; i++) {
        const long long skipped = i ? pieces[i].start - (pieces[i - 1].start + pieces[i - 1].length) : 0;
        if (skipped) {
            parts[left++] = (struct iovec){gap, (size_t)skipped};
        }
        if (pieces[i].length) {
            parts[left++] = (struct iovec){pieces[i].to, (size_t)pieces[i].length};
        }
    }
    while (left > 0) {
        ssize_t got = preadv(fd, part, left, (off_t)at);
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got <= 0) {
            return 0;
        }
        at += got;
        while (left > 0 && got >= (ssize_t)part->iov_len) {
            got -= (ssize_t)part->iov_len;
            part++;
            left--;
        }
        if (left > 0) {
            part->iov_base = (char *)part->iov_base + got;
            part->iov_len -= (size_t)got;
        }
    }
    return 1;
}

static void read_pieces(Piece *pieces, Py_ssize_t count) {
    struct stat status;
    int fd = -1;
    for (Py_ssize_t i = 0, n; i < count; i += n) {
        n = run_length(pieces + i, count - i);
        if (i == 0 || pieces[i].path != pieces[i - 1].path) {
            if (fd >= 0) {
                close(fd);
            }
            /* Without O_NONBLOCK, opening a named pipe would wait for a writer for ever. */
            fd = open(pieces[i].path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
            if (fd >= 0 && (fstat(fd, &status) < 0 || !S_ISREG(status.st_mode))) {
                close(fd);
                fd = -1;
            }
        }
        const int whole = fd >= 0 && is_as_listed(&status, pieces[i].etag) && read_run(fd, pieces + i, n);
        for (Py_ssize_t k = i; k < i + n && !whole; k++) {
            pieces[k].failed = 1;
        }
    }
    if (fd >= 0) {
        close(fd);
    }
}

/* Fills pieces[i] from the lists; `encoded` keeps what the paths point into alive. */
static int get_piece(Piece *pieces, Py_ssize_t i, PyObject *const lists[5], PyObject *encoded, const Py_buffer *buffer) {
    PyObject *path = PyList_GET_ITEM(lists[0], i), *etag = PyList_GET_ITEM(lists[3], i);
    Piece *piece = &pieces[i];
    if (i && path == PyList_GET_ITEM(lists[0], i - 1)) {
        piece->path = pieces[i - 1].path;
    } else {
        PyObject *bytes = PyUnicode_EncodeFSDefault(path);
        piece->path = ""; /* no file is called so: a path that cannot be one fails, and NUL does not make it another */
        if (bytes == NULL && PyErr_ExceptionMatches(PyExc_UnicodeError)) {
            PyErr_Clear();
        } else if (bytes == NULL || PyList_Append(encoded, bytes) < 0) {
            Py_XDECREF(bytes);
            return -1;
        } else {
            const int is_whole = strlen(PyBytes_AS_STRING(bytes)) == (size_t)PyBytes_GET_SIZE(bytes);
            piece->path = is_whole ? PyBytes_AS_STRING(bytes) : "";
            Py_DECREF(bytes);
        }
    }
    piece->etag = etag == Py_None ? NULL : PyUnicode_AsUTF8(etag);
    piece->start = PyLong_AsLongLong(PyList_GET_ITEM(lists[1], i));
    piece->length = PyLong_AsSsize_t(PyList_GET_ITEM(lists[2], i));
    const Py_ssize_t offset = PyLong_AsSsize_t(PyList_GET_ITEM(lists[4], i));
    if (PyErr_Occurred()) {
        return -1;
    }
    if (piece->start < 0 || piece->length < 0 || offset < 0 || offset > buffer->len || piece->length > buffer->len - offset) {
        PyErr_SetString(PyExc_ValueError, "ranges must lie in the file and fit the buffer");
        return -1;
    }
    piece->to = (char *)buffer->buf + offset;
    return 0;
}

static PyObject *read_many(PyObject *self, PyObject *args) {
    PyObject *lists[5];
    Py_buffer buffer;
    (void)self;
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!w*", &PyList_Type, &lists[0], &PyList_Type, &lists[1], &PyList_Type, &lists[2],
                          &PyList_Type, &lists[3], &PyList_Type, &lists[4], &buffer)) {
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(lists[0]);
    PyObject *encoded = PyList_New(0), *result = NULL;
    Piece *pieces = PyMem_Calloc(count ? (size_t)count : 1, sizeof(Piece));
    int failed = encoded == NULL || pieces == NULL;
    for (int k = 1; k < 5 && !failed; k++) {
        if (PyList_GET_SIZE(lists[k]) != count) {
            PyErr_SetString(PyExc_ValueError, "the lists differ in length");
            failed = 1;
        }
    }
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        failed = get_piece(pieces, i, lists, encoded, &buffer) < 0;
    }
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS;
        read_pieces(pieces, count);
        Py_END_ALLOW_THREADS;
        for (Py_ssize_t i = 0; i < count && !failed; i++) {
            if (pieces[i].failed) {
                if (result == NULL && (result = PyList_New(0)) == NULL) {
                    failed = 1;
                    break;
                }
                PyObject *place = PyLong_FromSsize_t(i);
                failed = place == NULL || PyList_Append(result, place) < 0;
                Py_XDECREF(place);
            }
        }
    }
    Py_XDECREF(encoded);
    PyMem_Free(pieces);
    PyBuffer_Release(&buffer);
    if (failed) {
        Py_XDECREF(result);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return result != NULL ? result : Py_NewRef(Py_None);
}

/* Copies of the parts of a buffer that lie one behind another: a slice and a `bytes` in Python take three times as long. */
static PyObject *cut(PyObject *self, PyObject *args) {
    Py_buffer buffer;
    PyObject *lengths;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*O!", &buffer, &PyList_Type, &lengths)) {
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(lengths);
    PyObject *result = PyList_New(count);
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < count && result != NULL; i++) {
        const Py_ssize_t length = PyLong_AsSsize_t(PyList_GET_ITEM(lengths, i));
        PyObject *part = NULL;
        if (length >= 0 && length <= buffer.len - at) {
            part = PyBytes_FromStringAndSize((const char *)buffer.buf + at, length);
            at += length;
        } else if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "the parts must lie in the buffer");
        }
        if (part == NULL) {
            Py_CLEAR(result);
        } else {
            PyList_SET_ITEM(result, i, part);
        }
    }
    PyBuffer_Release(&buffer);
    return result;
}

static PyObject *read_range(PyObject *self, PyObject *args) {
    PyObject *path;
    long long start;
    Py_buffer buffer;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&Lw*", PyUnicode_FSConverter, &path, &start, &buffer)) {
        return NULL;
    }
    const int64_t only = (int64_t)start;
    PyObject *result = read_from(path, buffer.buf, buffer.len, &only, 1);
    PyBuffer_Release(&buffer);
    return result;
}

static PyObject *gather_ranges(PyObject *self, PyObject *args) {
    PyObject *path, *starts_object, *result = NULL;
    Py_ssize_t length;
    Py_buffer buffer, starts;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&Onw*", PyUnicode_FSConverter, &path, &starts_object, &length, &buffer)) {
        return NULL;
    }
    if (PyObject_GetBuffer(starts_object, &starts, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        Py_DECREF(path);
    } else {
        const char *format = starts.format == NULL ? "" : starts.format;
        const int is_int64 = starts.itemsize == 8 && (strcmp(format, "l") == 0 || strcmp(format, "q") == 0);
        const Py_ssize_t count = starts.len / 8;
        if (starts.ndim != 1 || !is_int64 || length < 1 || buffer.len % length != 0 || buffer.len / length != count) {
            PyErr_SetString(PyExc_ValueError, "starts must be int64 [n], and the buffer n times a length of at least 1");
            Py_DECREF(path);
        } else {
            result = read_from(path, buffer.buf, length, starts.buf, count);
        }
        PyBuffer_Release(&starts);
    }
    PyBuffer_Release(&buffer);
    return result;
}

/* -------------------------------------------------------------------------------------------------------- tar headers */

#define TAR_BLOCK 512

/* An octal field as everybody writes it: blanks, digits, then blanks or NULs. -1 for anything else, also for nothing. */
static long long tar_number(const uint8_t *at, int size) {
    long long value = 0;
    int i = 0, digits = 0;
    while (i < size && at[i] == ' ') {
        i++;
    }
    for (; i < size && at[i] >= '0' && at[i] <= '7'; i++, digits++) {
        value = value * 8 + (at[i] - '0');
    }
    for (; i < size; i++) {
        if (at[i] == 0) {
            return digits ? value : -1;
        }
        if (at[i] != ' ') {
            return -1;
        }
    }
    return digits ? value : -1;
}

/* The size of the plain file whose header this is, or -1: everything unusual is left to others. */
static long long tar_plain_size(const uint8_t *header) {
    const long long stored = tar_number(header + 148, 8);
    long long sum = 8 * ' ';
    for (int i = 0; i < TAR_BLOCK; i++) {
        sum += i >= 148 && i < 156 ? 0 : header[i];
    }
    const int is_file = header[156] == '0' || header[156] == '7';
    const int has_prefix = header[345] != 0 && memcmp(header + 257, "ustar", 6) == 0;
    return header[0] && stored == sum && is_file && !has_prefix ? tar_number(header + 124, 12) : -1;
}

/* tar_run(data, offset, end, size) -> ([(name, start, size), ...], next): the plain files from the header at `offset` of the
 * archive's piece `data` (valid up to `end`; the archive goes on to `size`) on, as far as headers follow that lie in it. */
static PyObject *tar_run(PyObject *self, PyObject *args) {
    Py_buffer data;
    Py_ssize_t offset, end;
    long long size;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*nnL", &data, &offset, &end, &size)) {
        return NULL;
    }
    PyObject *found = PyList_New(0);
    while (found != NULL && offset >= 0 && offset + TAR_BLOCK <= (end < data.len ? end : data.len)) {
        const uint8_t *header = (const uint8_t *)data.buf + offset;
        const long long length = tar_plain_size(header), start = offset + TAR_BLOCK;
        if (length < 0 || length > size - start) {
            break;
        }
        const Py_ssize_t name_size = (Py_ssize_t)strnlen((const char *)header, 100);
        PyObject *entry = Py_BuildValue("(y#LL)", (const char *)header, name_size, start, length);
        if (entry == NULL || PyList_Append(found, entry) < 0) {
            Py_CLEAR(found);
        }
        Py_XDECREF(entry);
        offset = (Py_ssize_t)(start + (length + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK);
    }
    PyBuffer_Release(&data);
    return found == NULL ? NULL : Py_BuildValue("(Nn)", found, offset);
}

/* The frame header of a baseline, extended or progressive JPEG of 8 bits; None for everything else. A few hundred
 * nanoseconds, against 10 us in a decoder that sets itself up for it. */
static PyObject *jpeg_size(PyObject *self, PyObject *object) {
    Py_buffer data;
    PyObject *result = Py_None;
    (void)self;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const uint8_t *at = data.buf, *end = at + data.len;
    if (data.len > 4 && at[0] == 0xFF && at[1] == 0xD8) {
        at += 2;
        while (end - at > 9 && at[0] == 0xFF) {
            const int marker = at[1];
            if (marker == 0xFF) { /* a fill byte */
                at++;
                continue;
            }
            if (marker >= 0xC0 && marker <= 0xC2 && at[4] == 8) {
                result = Py_BuildValue("(iii)", at[5] << 8 | at[6], at[7] << 8 | at[8], at[9]);
                break;
            }
            const int is_frame = marker >= 0xC0 && marker <= 0xCF && marker != 0xC4 && marker != 0xC8 && marker != 0xCC;
            if (is_frame || marker == 0xDA || marker == 0x01 || (marker >= 0xD0 && marker <= 0xD9)) {
                break;
            }
            const Py_ssize_t length = 2 + (at[2] << 8 | at[3]);
            at += length < end - at ? length : end - at;
        }
    }
    PyBuffer_Release(&data);
    return result == Py_None ? Py_NewRef(Py_None) : result;
}

/* ----------------------------------------------------------------------------------------------------- resampling
 *
 * The antialiased bilinear filter as Pillow defines it (Image.resize, reducing_gap none): a triangle as wide as the scale,
 * cut at the borders, its weights summing to one. Here in 14 bits, each output row first down the columns into one row of
 * bytes, then along it: the source is read once, and what is between the two passes stays in the first-level cache.
 */
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

/* Fills `reach` [out] and `weights` [out][most]. */
static void filter_weights(const Span *span, Reach *reach, int16_t *weights, Py_ssize_t most) {
    const Py_ssize_t in = span->in;
    const double scale = span->extent / (double)span->out, width = scale < 1.0 ? 1.0 : scale;
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

static int resample_avx2(const Py_buffer *pixels, uint8_t *target, const Span *down, const Span *along) {
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
        filter_weights(down, reach, weights, most_down);
        filter_weights(along, reach + height, weights_along, most_along);
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
} Job;

/* Fills a job from (target, pixels, None or (top, left, height, width)). */
static int get_job(PyObject *object, Job *job) {
    PyObject *target, *pixels, *part;
    if (!PyArg_ParseTuple(object, "OOO", &target, &pixels, &part) || get_pixels(pixels, &job->pixels, 0) < 0 ||
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

static PyObject *resample(PyObject *self, PyObject *list) {
    (void)self;
    if (!PyList_Check(list)) {
        PyErr_SetString(PyExc_TypeError, "a list of (target, pixels, part) is wanted");
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
            enough = resample_avx2(&jobs[i].pixels, jobs[i].target.buf, &jobs[i].down, &jobs[i].along);
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

static PyMethodDef methods[] = {
    {"resample", resample, METH_O, "resample([(target, pixels, part), ...]) -> whether this CPU can"},
    {"read_range", read_range, METH_VARARGS, "read_range(path, start, buffer) -> (bytes read, mode, size, mtime_ns)"},
    {"read_many", read_many, METH_VARARGS, "read_many(paths, starts, lengths, etags, offsets, buffer) -> places that failed, or None"},
    {"cut", cut, METH_VARARGS, "cut(buffer, lengths) -> list of bytes"},
    {"tar_run", tar_run, METH_VARARGS, "tar_run(data, offset, end, size) -> ([(name, start, size), ...], next offset)"},
    {"jpeg_size", jpeg_size, METH_O, "jpeg_size(data) -> (height, width, components) or None"},
    {"gather_ranges", gather_ranges, METH_VARARGS, "gather_ranges(path, starts, length, buffer) -> as read_range"},
    {"write_normalized", write_normalized, METH_VARARGS, "write_normalized(slots, first, images, scale, shift)"},
    {"write_planes", write_planes, METH_VARARGS, "write_planes(slots, slot, pixels)"},
    {"mirror", mirror, METH_VARARGS, "mirror(target, pixels)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", "Moving bytes and pixels.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
