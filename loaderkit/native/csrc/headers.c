/* Parses plain tar headers and the names of members, and the headers of JPEGs. */
#include "kernels.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

#define TAR_BLOCK 512
#define TAR_NAME 100
#define MOST_EXTENSIONS 64

/* An octal field in the common form: blanks, digits, then blanks or NULs. -1 for anything else, also if it is empty. */
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

/* The sum of a block's bytes, eight at a time: every second one of them is added to one of four sums of 16 bits, which 64 times
 * 2 * 255 do not overflow. */
static long long sum_of_block(const uint8_t *block) {
    const uint64_t every_second = 0x00ff00ff00ff00ffULL;
    uint64_t sums = 0, eight;
    for (int i = 0; i < TAR_BLOCK; i += 8) {
        memcpy(&eight, block + i, 8);
        sums += (eight & every_second) + (eight >> 8 & every_second);
    }
    return (long long)((sums & 0xffff) + (sums >> 16 & 0xffff) + (sums >> 32 & 0xffff) + (sums >> 48));
}

/* The size of the plain file whose header this is; -1 for anything unusual, which Python parses. */
static long long tar_plain_size(const uint8_t *header) {
    const long long stored = tar_number(header + 148, 8);
    long long sum = sum_of_block(header);
    for (int i = 148; i < 156; i++) { /* the checksum field, which counts as blanks */
        sum += ' ' - header[i];
    }
    const int is_file = header[156] == '0' || header[156] == '7';
    const int has_prefix = header[345] != 0 && memcmp(header + 257, "ustar", 6) == 0;
    return header[0] && stored == sum && is_file && !has_prefix ? tar_number(header + 124, 12) : -1;
}

/* tar_run(data, offset, end, size) -> (names, starts, sizes, next): the plain files from the header at `offset` of the
 * archive's piece `data` (valid up to `end`; the archive ends at `size`) on, as far as headers follow that lie in it.
 * Every name is ended by a NUL; starts and sizes are int64. */
PyObject *tar_run(PyObject *self, PyObject *args) {
    Py_buffer data;
    Py_ssize_t offset, end;
    long long size;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*nnL", &data, &offset, &end, &size)) {
        return NULL;
    }
    end = end < data.len ? end : data.len;
    const size_t most = offset >= 0 && end > offset ? (size_t)(end - offset) / TAR_BLOCK : 0;
    char *names = PyMem_RawMalloc(most * (TAR_NAME + 1) + 1);
    int64_t *starts = PyMem_RawMalloc(most * 8 + 1), *sizes = PyMem_RawMalloc(most * 8 + 1);
    size_t num = 0, num_bytes = 0;
    PyObject *result = NULL;
    if (names == NULL || starts == NULL || sizes == NULL) {
        PyErr_NoMemory();
    } else {
        Py_BEGIN_ALLOW_THREADS;
        while (num < most && offset + TAR_BLOCK <= end) {
            const uint8_t *header = (const uint8_t *)data.buf + offset;
            const long long length = tar_plain_size(header), start = offset + TAR_BLOCK;
            if (length < 0 || length > size - start) {
                break;
            }
            const size_t name_size = strnlen((const char *)header, TAR_NAME);
            memcpy(names + num_bytes, header, name_size);
            num_bytes += name_size;
            names[num_bytes++] = 0;
            starts[num] = start;
            sizes[num++] = length;
            offset = (Py_ssize_t)(start + (length + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK);
        }
        Py_END_ALLOW_THREADS;
        result = Py_BuildValue("(y#y#y#n)", names, (Py_ssize_t)num_bytes, (char *)starts, (Py_ssize_t)(num * 8),
                               (char *)sizes, (Py_ssize_t)(num * 8), offset);
    }
    PyMem_RawFree(names);
    PyMem_RawFree(starts);
    PyMem_RawFree(sizes);
    PyBuffer_Release(&data);
    return result;
}

/* The result of `group_names`; every array has room for one entry per member. */
typedef struct {
    char *keys;
    int64_t *key_ends, *counts, *places;
    int32_t *extensions;
    const char *extension_at[MOST_EXTENSIONS];
    size_t extension_sizes[MOST_EXTENSIONS];
    Py_ssize_t num_samples, num_kept, num_ignored;
    int num_extensions;
    int are_ascending; /* every key is greater than the one before, so no key repeats */
} Groups;

/* The number of an extension, compared without regard to case; -1 for one that Python must compare. */
static int extension_number(Groups *groups, const char *at, size_t size) {
    for (size_t i = 0; i < size; i++) {
        if ((unsigned char)at[i] >= 0x80 || at[i] == '/') {
            return -1;
        }
    }
    for (int k = 0; k < groups->num_extensions; k++) {
        if (groups->extension_sizes[k] == size && strncasecmp(groups->extension_at[k], at, size) == 0) {
            return k;
        }
    }
    if (size == 0 || groups->num_extensions == MOST_EXTENSIONS) {
        return -1;
    }
    groups->extension_at[groups->num_extensions] = at;
    groups->extension_sizes[groups->num_extensions] = size;
    return groups->num_extensions++;
}

/* True if a key is greater than that of the sample before, byte by byte. */
static int is_after_last(const Groups *groups, const char *key, size_t size) {
    const Py_ssize_t n = groups->num_samples;
    const size_t begin = n > 1 ? (size_t)groups->key_ends[n - 2] : 0, before = n ? (size_t)groups->key_ends[n - 1] - begin : 0;
    const int order = memcmp(key, groups->keys + begin, size < before ? size : before);
    return order > 0 || (order == 0 && size > before);
}

/* True if all names could be grouped by their dots alone, and no sample has an extension twice. */
static int find_groups(Groups *groups, const char *names, size_t num_bytes) {
    const char *key = NULL; /* of the latest member's sample, with its dot */
    size_t key_size = 0, num_key_bytes = 0, at = 0;
    int64_t place = 0;
    int32_t *seen = groups->extensions;
    for (; at < num_bytes; place++) {
        const char *name = names + at;
        const size_t size = strlen(name);
        at += size + 1;
        const char *slash = strrchr(name, '/');
        const char *base = slash != NULL ? slash + 1 : name;
        const char *dot = strchr(base, '.');
        const int goes_on = key != NULL && size >= key_size && memcmp(name, key, key_size) == 0 && base <= name + key_size;
        if (!goes_on) {
            if (size > 1 && name[0] == '_' && name[1] == '_') {
                return 0;
            }
            if (dot == NULL || dot == base || dot[1] == 0) {
                groups->num_ignored++;
                continue;
            }
            key = name;
            key_size = (size_t)(dot + 1 - name);
            groups->are_ascending = groups->are_ascending && is_after_last(groups, key, key_size - 1);
            memcpy(groups->keys + num_key_bytes, key, key_size - 1);
            num_key_bytes += key_size - 1;
            groups->key_ends[groups->num_samples] = (int64_t)num_key_bytes;
            groups->counts[groups->num_samples++] = 0;
            seen = groups->extensions + groups->num_kept;
        }
        const int number = extension_number(groups, name + key_size, size - key_size);
        const int32_t *last = groups->extensions + groups->num_kept;
        for (const int32_t *one = seen; one < last; one++) {
            if (*one == number) {
                return 0;
            }
        }
        if (number < 0) {
            return 0;
        }
        groups->places[groups->num_kept] = place;
        groups->extensions[groups->num_kept++] = number;
        groups->counts[groups->num_samples - 1]++;
    }
    return 1;
}

static PyObject *lowered(const Groups *groups) {
    PyObject *list = PyList_New(groups->num_extensions);
    for (int k = 0; list != NULL && k < groups->num_extensions; k++) {
        PyObject *text = PyUnicode_New((Py_ssize_t)groups->extension_sizes[k], 127);
        if (text == NULL) {
            Py_CLEAR(list);
            break;
        }
        for (size_t i = 0; i < groups->extension_sizes[k]; i++) {
            PyUnicode_1BYTE_DATA(text)[i] = (Py_UCS1)tolower(groups->extension_at[k][i]);
        }
        PyList_SET_ITEM(list, k, text);
    }
    return list;
}

/* group_names(names, num) -> (keys, key ends, members a sample, their places, their extensions, extensions, number of members
 * that belong to no sample, whether the keys ascend): the samples that `num` members make, whose names are each ended by a NUL.
 * Members that follow one another and are called alike up to the first dot of the base name are a sample. None where that takes
 * a closer look. */
PyObject *group_names(PyObject *self, PyObject *args) {
    const char *names;
    Py_ssize_t num_bytes, num;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#n", &names, &num_bytes, &num)) {
        return NULL;
    }
    Py_ssize_t num_here = 0;
    for (Py_ssize_t i = 0; i < num_bytes; i++) {
        num_here += names[i] == 0;
    }
    if (num_here != num || (num_bytes && names[num_bytes - 1])) {
        PyErr_SetString(PyExc_ValueError, "there must be as many names as members, each ended by a NUL");
        return NULL;
    }
    const size_t room = (size_t)num + 1;
    Groups groups = {.keys = PyMem_RawMalloc((size_t)num_bytes + 1),
                     .key_ends = PyMem_RawMalloc(room * 8),
                     .counts = PyMem_RawMalloc(room * 8),
                     .places = PyMem_RawMalloc(room * 8),
                     .extensions = PyMem_RawMalloc(room * 4),
                     .are_ascending = 1};
    PyObject *result = NULL;
    if (!groups.keys || !groups.key_ends || !groups.counts || !groups.places || !groups.extensions) {
        PyErr_NoMemory();
    } else {
        int is_plain;
        Py_BEGIN_ALLOW_THREADS;
        is_plain = find_groups(&groups, names, (size_t)num_bytes);
        Py_END_ALLOW_THREADS;
        const Py_ssize_t n = groups.num_samples, kept = groups.num_kept;
        result = !is_plain ? Py_NewRef(Py_None)
                           : Py_BuildValue("(y#y#y#y#y#NnO)", groups.keys, n ? (Py_ssize_t)groups.key_ends[n - 1] : 0,
                                           (char *)groups.key_ends, n * 8, (char *)groups.counts, n * 8,
                                           (char *)groups.places, kept * 8, (char *)groups.extensions, kept * 4,
                                           lowered(&groups), groups.num_ignored, groups.are_ascending ? Py_True : Py_False);
    }
    PyMem_RawFree(groups.keys);
    PyMem_RawFree(groups.key_ends);
    PyMem_RawFree(groups.counts);
    PyMem_RawFree(groups.places);
    PyMem_RawFree(groups.extensions);
    return result;
}

#define LAST_BYTES 4096 /* of a JPEG, where its end marker is looked for */

static int big_endian(const uint8_t *at) {
    return at[0] << 8 | at[1];
}

/* True for a JPEG that is whole as far as its segments and its end marker tell; see the twin in Python. */
static int whole_jpeg(const uint8_t *data, size_t size, int *height, int *width) {
    size_t offset = 2;
    *height = *width = 0;
    if (size < 2 || data[0] != 0xff || data[1] != 0xd8) {
        return 0;
    }
    for (;;) {
        if (offset + 4 > size) {
            return 0;
        }
        const uint8_t *segment = data + offset;
        const int marker = segment[1], length = big_endian(segment + 2);
        if (segment[0] != 0xff || marker <= 0x01 || marker == 0xff || (marker >= 0xd0 && marker <= 0xd9)) {
            return 0;
        }
        if (marker == 0xda) {
            break;
        }
        if (*height == 0 && marker >= 0xc0 && marker <= 0xcf && marker != 0xc4 && marker != 0xc8 && marker != 0xcc) {
            if (marker > 0xc2 || offset + 10 > size || segment[4] != 8 || (segment[9] != 1 && segment[9] != 3)) {
                return 0;
            }
            *height = big_endian(segment + 5);
            *width = big_endian(segment + 7);
            if (*height == 0 || *width == 0) {
                return 0;
            }
        }
        if (length < 2) {
            return 0;
        }
        offset += 2 + (size_t)length;
    }
    const size_t first = size - offset > LAST_BYTES ? size - LAST_BYTES : offset;
    for (size_t at = size - 2; *height && at >= first; at--) {
        if (data[at] == 0xff && data[at + 1] == 0xd9) {
            return 1;
        }
    }
    return 0;
}

/* whole_jpeg_size(data) -> (height, width), or None */
PyObject *whole_jpeg_size(PyObject *self, PyObject *data) {
    Py_buffer view;
    int height, width;
    (void)self;
    if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    const int is_whole = whole_jpeg(view.buf, (size_t)view.len, &height, &width);
    PyBuffer_Release(&view);
    return is_whole ? Py_BuildValue("(ii)", height, width) : Py_NewRef(Py_None);
}
