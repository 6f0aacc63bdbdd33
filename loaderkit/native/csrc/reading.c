/* Reads ranges of files with few system calls. */
#define _GNU_SOURCE /* O_DIRECT */
#include "kernels.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static long long ns_of(struct timespec time) {
    return (long long)time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Fills `to` with the bytes from `start` on; returns their number, or -1 with errno. */
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

#ifndef O_DIRECT /* Linux */
#define O_DIRECT 0
#endif
#define ALIGNMENT 4096 /* of offsets and lengths in reads past the page cache */
#define STEP (1 << 21)
#define STEP_MEMORY (STEP + ALIGNMENT) /* an unaligned range of a step touches one more block */

static pthread_key_t step_key;
static pthread_once_t step_once = PTHREAD_ONCE_INIT;
static int has_step_key;

static void unmap_step(void *memory) {
    munmap(memory, STEP_MEMORY);
}

static void make_step_key(void) {
    has_step_key = pthread_key_create(&step_key, unmap_step) == 0;
}

/* STEP_MEMORY bytes aligned to large pages; NULL if there are none. A disk request has one segment per page of memory, and with
 * pages of 4 KiB it took twice as long. */
static char *map_step(void) {
    char *mapped = mmap(NULL, STEP + STEP_MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        return NULL;
    }
    const size_t before = (size_t)(-(uintptr_t)mapped % STEP);
    if (before) {
        munmap(mapped, before);
    }
    munmap(mapped + before + STEP_MEMORY, STEP - before);
#ifdef MADV_HUGEPAGE
    madvise(mapped + before, STEP, MADV_HUGEPAGE);
#endif
    return mapped + before;
}

/* The calling thread's buffer for reads past the page cache, kept until the thread ends; NULL without memory. */
static char *memory_for_step(void) {
    pthread_once(&step_once, make_step_key);
    char *memory = has_step_key ? pthread_getspecific(step_key) : NULL;
    if (memory == NULL && has_step_key && (memory = map_step()) != NULL && pthread_setspecific(step_key, memory) != 0) {
        unmap_step(memory);
        memory = NULL;
    }
    return memory;
}

/* pread_all of a file opened with O_DIRECT, through `memory`: a tensor's bytes are not aligned for the disk to write them there,
 * and a copy costs a tenth of the page cache's. */
static Py_ssize_t pread_around(int fd, char *memory, char *to, Py_ssize_t length, long long start) {
    Py_ssize_t done = 0;
    while (done < length) {
        const size_t skipped = (size_t)((start + done) % ALIGNMENT);
        const size_t wanted = skipped + (size_t)(length - done);
        const size_t size = wanted < STEP_MEMORY ? (wanted + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : STEP;
        const ssize_t got = pread(fd, memory, size, (off_t)(start + done - (long long)skipped));
        if (got < 0 && errno == EINTR) {
            continue;
        }
        if (got < 0) { /* more alignment is needed, or O_DIRECT fails here; an ordinary read raises any other error */
            fcntl(fd, F_SETFL, O_NONBLOCK);
            const Py_ssize_t more = pread_all(fd, to + done, length - done, start + done);
            return more < 0 ? more : done + more;
        }
        if (got <= (ssize_t)skipped) {
            return done;
        }
        const Py_ssize_t here = (Py_ssize_t)((size_t)got < wanted ? (size_t)got - skipped : wanted - skipped);
        memcpy(to + done, memory + skipped, (size_t)here);
        done += here;
    }
    return done;
}

/* pread_all; past the page cache if the buffer `around` is given. */
static Py_ssize_t pread_either_way(int fd, char *around, char *to, Py_ssize_t length, long long start) {
    return around != NULL && start >= 0 ? pread_around(fd, around, to, length, start) : pread_all(fd, to, length, start);
}

/* Ranges of one file: of `length` bytes each, or of lengths[i]; concatenated in memory, or each at offsets[i]. */
typedef struct {
    const int64_t *starts, *lengths, *offsets;
    Py_ssize_t count, length;
} Ranges;

/* Reads ranges until one is short; returns the number of bytes, or -1 with errno. A record of 16 bytes in the page cache costs
 * 0.3 us; ranges that are adjacent in the file and in memory are read together. */
static Py_ssize_t pread_ranges(int fd, char *around, char *to, const Ranges *ranges) {
    const int64_t *starts = ranges->starts, *lengths = ranges->lengths, *offsets = ranges->offsets;
    Py_ssize_t done = 0, end = 0, i = 0;
    while (i < ranges->count) {
        if ((lengths == NULL ? ranges->length : lengths[i]) == 0) { /* nothing to read, wherever it begins */
            i++;
            continue;
        }
        if (starts[i] < 0) {
            break;
        }
        const Py_ssize_t begin = offsets == NULL ? end : offsets[i], first = i;
        for (end = begin; i < ranges->count && (uint64_t)starts[i] == (uint64_t)starts[first] + (uint64_t)(end - begin) &&
                          (offsets == NULL || offsets[i] == end);
             i++) {
            end += lengths == NULL ? ranges->length : lengths[i];
        }
        const Py_ssize_t got = pread_either_way(fd, around, to + begin, end - begin, starts[first]);
        if (got < 0) {
            return -1;
        }
        done += got;
        if (got < end - begin) {
            break;
        }
    }
    return done;
}

/* Opens a file and calls fstat; returns a descriptor, or -1. `error` is the errno of either call. `around`: for reads past the
 * page cache, if the filesystem supports them. */
static int open_file(const char *path, struct stat *status, int *error, int around) {
    /* Without O_NONBLOCK, opening a named pipe would wait for a writer for ever. */
    const int flags = O_RDONLY | O_NONBLOCK | O_CLOEXEC;
    int fd = open(path, around ? flags | O_DIRECT : flags);
    if (fd < 0 && around) {
        fd = open(path, flags);
    }
    if (fd < 0 || fstat(fd, status) < 0) {
        *error = errno;
    }
    return fd;
}

/* What is hashed while it is read: blocks of `block` bytes, and what that took. */
typedef struct {
    Hash hash;
    Py_ssize_t block;
    uint64_t *hashes;
    long long took_ns;
} Hashing;

/* Fill `to`, and hash every block while it lies in the CPU's cache; as pread_all. Past the page cache as many blocks are read at once as
 * make a step, else one. */
static Py_ssize_t pread_hashed(int fd, char *around, char *to, Py_ssize_t length, long long start, Hashing *hashing) {
    const Py_ssize_t block = hashing->block, step = around != NULL && block < STEP ? STEP / block * block : block;
    uint64_t *hashes = hashing->hashes;
    for (Py_ssize_t done = 0; done < length; done += step) {
        const Py_ssize_t wanted = length - done < step ? length - done : step;
        const Py_ssize_t got = pread_either_way(fd, around, to + done, wanted, start + done);
        if (got < wanted) {
            return got < 0 ? got : done + got;
        }
        struct timespec before, after;
        clock_gettime(CLOCK_MONOTONIC, &before);
        for (Py_ssize_t at = 0; at < wanted; at += block) {
            *hashes++ = hashing->hash(to + done + at, (size_t)(wanted - at < block ? wanted - at : block));
        }
        clock_gettime(CLOCK_MONOTONIC, &after);
        hashing->took_ns += ns_of(after) - ns_of(before);
    }
    return length;
}

/* open, fstat, read the ranges (with `hashing` the only one), close: (bytes read, mode, size, mtime in ns), or NULL with an OSError
 * set. Only a regular file is read. `path` is released. */
static PyObject *read_from(PyObject *path, char *to, const Ranges *ranges, int is_around, Hashing *hashing) {
    struct stat status;
    Py_ssize_t done = 0;
    int error = 0;
    memset(&status, 0, sizeof status);
    Py_BEGIN_ALLOW_THREADS;
    char *around = is_around ? memory_for_step() : NULL;
    const int fd = open_file(PyBytes_AS_STRING(path), &status, &error, around != NULL);
    if (error == 0 && S_ISREG(status.st_mode)) {
        done = hashing == NULL ? pread_ranges(fd, around, to, ranges) : pread_hashed(fd, around, to, ranges->length, *ranges->starts, hashing);
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
        result = Py_BuildValue("(nILL)", done, (unsigned int)status.st_mode, (long long)status.st_size, ns_of(status.st_mtim));
    }
    Py_DECREF(path);
    return result;
}

/* One range of a file, and the target of its bytes. Consecutive ranges of one file share `path`. */
typedef struct {
    const char *path, *etag;
    long long start;
    Py_ssize_t length;
    char *to;
    int failed;
} Piece;

#define MOST_GAP 8192 /* gaps between two ranges (headers and padding of a tar) up to this size are cheaper read than skipped */
#define MOST_PARTS 256
#define SMALL 4096 /* ranges of at least this size are read into their targets; smaller ones are cheaper to copy */
#define MOST_SPAN 65536

/* Writes a number in lower-case hexadecimal digits; returns the end. `printf` takes five times as long. */
static char *put_hex(char *to, unsigned long long number) {
    int bits = 60;
    while (bits > 0 && (number >> bits) == 0) {
        bits -= 4;
    }
    for (; bits >= 0; bits -= 4) {
        *to++ = "0123456789abcdef"[(number >> bits) & 15];
    }
    return to;
}

static int is_as_listed(const struct stat *status, const char *etag) {
    char etag_now[2 * 16 + 2], *end = put_hex(etag_now, (unsigned long long)ns_of(status->st_mtim));
    *end++ = '-';
    end = put_hex(end, (unsigned long long)status->st_size);
    *end = '\0';
    return etag == NULL || strcmp(etag_now, etag) == 0;
}

/* The distance from the first byte of the first range to the end of the last. */
static long long span_of(const Piece *pieces, Py_ssize_t count) {
    return pieces[count - 1].start + pieces[count - 1].length - pieces[0].start;
}

/* The number of ranges, from the first on, that lie close enough for one call. */
static Py_ssize_t run_length(const Piece *pieces, Py_ssize_t count) {
    Py_ssize_t n = 1;
    const int are_small = pieces[0].length < SMALL;
    while (n < count && n < (are_small ? MOST_SPAN : MOST_PARTS / 2) && pieces[n].path == pieces[0].path && pieces[n].etag == pieces[0].etag) {
        const long long gap = pieces[n].start - (pieces[n - 1].start + pieces[n - 1].length);
        if (gap < 0 || gap > MOST_GAP || (are_small && span_of(pieces, n + 1) > MOST_SPAN)) {
            break;
        }
        n++;
    }
    return n;
}

/* Reads adjacent small ranges of one open file by one read, and copies each. */
static int read_small(int fd, const Piece *pieces, Py_ssize_t count) {
    char bytes[MOST_SPAN];
    const long long start = pieces[0].start;
    const Py_ssize_t span = (Py_ssize_t)span_of(pieces, count);
    if (pread_all(fd, bytes, span, start) != span) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        memcpy(pieces[i].to, bytes + (pieces[i].start - start), (size_t)pieces[i].length);
    }
    return 1;
}

/* Reads `count` adjacent ranges of one open file; returns true if all bytes came. */
static int read_run(int fd, const Piece *pieces, Py_ssize_t count) {
    if (count > 2 && pieces[0].length < SMALL && span_of(pieces, count) <= MOST_SPAN) {
        return read_small(fd, pieces, count);
    }
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

/* A range's index in the lists, and its sort key: first the first index of its file. */
typedef struct {
    PyObject *key;
    long long start;
    Py_ssize_t place, first;
} Place;

static int compare_places(const void *left, const void *right) {
    const Place *a = left, *b = right;
    if (a->first != b->first) {
        return a->first < b->first ? -1 : 1;
    }
    if (a->key != b->key) {
        return (uintptr_t)a->key < (uintptr_t)b->key ? -1 : 1;
    }
    return a->start != b->start ? (a->start < b->start ? -1 : 1) : a->place < b->place ? -1 : 1;
}

/* True if the ranges are sorted already: file by file, ascending, as those of samples in canonical order. */
static int are_in_order(const Place *places, Py_ssize_t count) {
    int num_changes = 0;
    for (Py_ssize_t i = 1; i < count; i++) {
        if (places[i].key != places[i - 1].key) {
            num_changes++;
        } else if (places[i].start < places[i - 1].start) {
            return 0;
        }
    }
    return num_changes <= 1;
}

/* Sorts the ranges by file and offset: else shuffled samples from a few shards would open a file for each (64 of 2 kB: 300 us
 * instead of 130). */
static void put_in_order(Place *places, Py_ssize_t count) {
    if (are_in_order(places, count)) {
        return;
    }
    qsort(places, (size_t)count, sizeof(Place), compare_places);
    for (Py_ssize_t i = 0, end; i < count; i = end) {
        Py_ssize_t first = places[i].place;
        for (end = i + 1; end < count && places[end].key == places[i].key; end++) {
            first = places[end].place < first ? places[end].place : first;
        }
        for (Py_ssize_t k = i; k < end; k++) {
            places[k].first = first;
        }
    }
    qsort(places, (size_t)count, sizeof(Place), compare_places);
}

/* Fills pieces[i] from the lists; `encoded` keeps what the paths point into alive. */
static int get_piece(Piece *pieces, Py_ssize_t i, const Place *places, PyObject *path_of, PyObject *const lists[5], PyObject *encoded, const Py_buffer *buffer) {
    const Py_ssize_t place = places[i].place;
    PyObject *etag = PyList_GET_ITEM(lists[3], place);
    Piece *piece = &pieces[i];
    if (i && places[i].key == places[i - 1].key) {
        piece->path = pieces[i - 1].path;
    } else {
        PyObject *path = PyObject_CallOneArg(path_of, places[i].key);
        if (path == NULL) {
            return -1;
        }
        PyObject *bytes = PyUnicode_EncodeFSDefault(path);
        Py_DECREF(path);
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
    piece->start = places[i].start;
    piece->length = PyLong_AsSsize_t(PyList_GET_ITEM(lists[2], place));
    const Py_ssize_t offset = PyLong_AsSsize_t(PyList_GET_ITEM(lists[4], place));
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

PyObject *read_many(PyObject *self, PyObject *args) {
    PyObject *path_of, *lists[5];
    Py_buffer buffer;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO!O!O!O!O!w*", &path_of, &PyList_Type, &lists[0], &PyList_Type, &lists[1], &PyList_Type, &lists[2],
                          &PyList_Type, &lists[3], &PyList_Type, &lists[4], &buffer)) {
        return NULL;
    }
    const Py_ssize_t count = PyList_GET_SIZE(lists[0]);
    PyObject *encoded = PyList_New(0), *result = NULL;
    Piece *pieces = PyMem_Calloc(count ? (size_t)count : 1, sizeof(Piece));
    Place *places = PyMem_Calloc(count ? (size_t)count : 1, sizeof(Place));
    int failed = encoded == NULL || pieces == NULL || places == NULL;
    for (int k = 1; k < 5 && !failed; k++) {
        if (PyList_GET_SIZE(lists[k]) != count) {
            PyErr_SetString(PyExc_ValueError, "the lists differ in length");
            failed = 1;
        }
    }
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        places[i] = (Place){PyList_GET_ITEM(lists[0], i), PyLong_AsLongLong(PyList_GET_ITEM(lists[1], i)), i, 0};
        failed = places[i].start == -1 && PyErr_Occurred();
    }
    if (!failed) {
        put_in_order(places, count);
    }
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        failed = get_piece(pieces, i, places, path_of, lists, encoded, &buffer) < 0;
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
                PyObject *place = PyLong_FromSsize_t(places[i].place);
                failed = place == NULL || PyList_Append(result, place) < 0;
                Py_XDECREF(place);
            }
        }
    }
    Py_XDECREF(encoded);
    PyMem_Free(pieces);
    PyMem_Free(places);
    PyBuffer_Release(&buffer);
    if (failed) {
        Py_XDECREF(result);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return result != NULL ? result : Py_NewRef(Py_None);
}

/* Copies of the parts of a buffer that lie one behind another: a slice and a `bytes` in Python take three times as long. */
PyObject *cut(PyObject *self, PyObject *args) {
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

PyObject *read_range(PyObject *self, PyObject *args) {
    PyObject *path;
    long long start;
    Py_buffer buffer;
    int is_around;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&Lw*p", PyUnicode_FSConverter, &path, &start, &buffer, &is_around)) {
        return NULL;
    }
    const int64_t only = (int64_t)start;
    const Ranges range = {.starts = &only, .count = 1, .length = buffer.len};
    PyObject *result = read_from(path, buffer.buf, &range, is_around, NULL);
    PyBuffer_Release(&buffer);
    return result;
}

/* The list of some hashes. */
static PyObject *list_of(const uint64_t *hashes, Py_ssize_t count) {
    PyObject *numbers = PyList_New(count);
    for (Py_ssize_t i = 0; numbers != NULL && i < count; i++) {
        PyObject *one = PyLong_FromUnsignedLongLong(hashes[i]);
        if (one == NULL) {
            Py_CLEAR(numbers);
        } else {
            PyList_SET_ITEM(numbers, i, one);
        }
    }
    return numbers;
}

/* (what read_range gives, the hashes of all blocks, the last of which may be shorter, the seconds they took). `address`: that of a C
 * function, which the caller answers for. */
PyObject *read_hashed(PyObject *self, PyObject *args) {
    PyObject *path, *result = NULL;
    long long start;
    Py_ssize_t block;
    unsigned long long address;
    Py_buffer buffer;
    int is_around;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&Lw*nKp", PyUnicode_FSConverter, &path, &start, &buffer, &block, &address, &is_around)) {
        return NULL;
    }
    if (block < 1 || address == 0) {
        PyErr_SetString(PyExc_ValueError, "blocks have at least one byte, and a hash has an address");
        Py_DECREF(path);
    } else {
        const int64_t only = (int64_t)start;
        const Ranges range = {.starts = &only, .count = 1, .length = buffer.len};
        const Py_ssize_t count = buffer.len / block + (buffer.len % block != 0);
        Hashing hashing = {(Hash)(uintptr_t)address, block, PyMem_Calloc((size_t)count + 1, sizeof(uint64_t)), 0};
        if (hashing.hashes == NULL) {
            PyErr_NoMemory();
            Py_DECREF(path);
        } else {
            PyObject *status = read_from(path, buffer.buf, &range, is_around, &hashing);
            const int is_whole = status != NULL && PyLong_AsSsize_t(PyTuple_GET_ITEM(status, 0)) == buffer.len;
            result = status == NULL ? NULL : Py_BuildValue("(NNd)", status, list_of(hashing.hashes, is_whole ? count : 0), (double)hashing.took_ns * 1e-9);
            PyMem_Free(hashing.hashes);
        }
    }
    PyBuffer_Release(&buffer);
    return result;
}

/* The view of `starts`, int64 [n], whose ranges of `length` bytes fill the buffer; -1 with a ValueError. */
static int get_starts(PyObject *object, Py_buffer *starts, Py_ssize_t length, const Py_buffer *buffer) {
    if (PyObject_GetBuffer(object, starts, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0) {
        return -1;
    }
    const char *format = starts->format == NULL ? "" : starts->format;
    const int is_int64 = starts->itemsize == 8 && (strcmp(format, "l") == 0 || strcmp(format, "q") == 0);
    if (starts->ndim != 1 || !is_int64 || length < 1 || buffer->len % length != 0 || buffer->len / length != starts->len / 8) {
        PyErr_SetString(PyExc_ValueError, "starts must be int64 [n], and the buffer n times a length of at least 1");
        PyBuffer_Release(starts);
        return -1;
    }
    return 0;
}

PyObject *gather_ranges(PyObject *self, PyObject *args) {
    PyObject *path, *starts_object, *result = NULL;
    Py_ssize_t length;
    Py_buffer buffer, starts;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&Onw*", PyUnicode_FSConverter, &path, &starts_object, &length, &buffer)) {
        return NULL;
    }
    if (get_starts(starts_object, &starts, length, &buffer) < 0) {
        Py_DECREF(path);
    } else {
        const Ranges ranges = {.starts = starts.buf, .count = starts.len / 8, .length = length};
        result = read_from(path, buffer.buf, &ranges, 0, NULL);
        PyBuffer_Release(&starts);
    }
    PyBuffer_Release(&buffer);
    return result;
}

/* gather_ranges of ranges that differ in length: range i goes to offsets[i] of the buffer. */
PyObject *scatter_ranges(PyObject *self, PyObject *args) {
    PyObject *path, *objects[3], *result = NULL;
    Py_buffer buffer, columns[3];
    int num_open = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "O&OOOw*", PyUnicode_FSConverter, &path, &objects[0], &objects[1], &objects[2], &buffer)) {
        return NULL;
    }
    for (Py_ssize_t step; num_open < 3; num_open++) {
        if (get_column(objects[num_open], &columns[num_open], -1, 0, &step) < 0) {
            break;
        }
    }
    int fits = num_open == 3 && columns[1].len == columns[0].len && columns[2].len == columns[0].len;
    if (num_open == 3) {
        const Ranges ranges = {.starts = columns[0].buf, .lengths = columns[1].buf, .offsets = columns[2].buf, .count = columns[0].len / 8};
        for (Py_ssize_t i = 0; fits && i < ranges.count; i++) {
            fits = ranges.lengths[i] >= 0 && ranges.offsets[i] >= 0 && ranges.lengths[i] <= buffer.len && ranges.offsets[i] <= buffer.len - ranges.lengths[i];
        }
        if (fits) {
            result = read_from(path, buffer.buf, &ranges, 0, NULL); /* which releases the path */
        } else {
            PyErr_SetString(PyExc_IndexError, "starts, lengths and offsets must be int64 [n], and the ranges lie in the buffer");
        }
    }
    if (!fits) {
        Py_DECREF(path);
    }
    while (num_open-- > 0) {
        PyBuffer_Release(&columns[num_open]);
    }
    PyBuffer_Release(&buffer);
    return result;
}
