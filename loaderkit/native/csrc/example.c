/* Records of TensorFlow: CRC-32C, and tf.train.Example, which is parsed as its protocol buffer says, and strictly. */
#include "kernels.h"
#include <string.h>

#define CASTAGNOLI 0x82F63B78u /* bits reversed */
#define KEEPS_THE_GIL (64 << 10) /* bytes */

static uint32_t tables[8][256];

static void make_tables(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++) {
            value = value >> 1 ^ (value & 1 ? CASTAGNOLI : 0);
        }
        tables[0][i] = value;
    }
    for (uint32_t i = 0; i < 256; i++) {
        for (int k = 1; k < 8; k++) {
            tables[k][i] = tables[k - 1][i] >> 8 ^ tables[0][tables[k - 1][i] & 0xff];
        }
    }
}

static uint32_t by_tables(uint32_t crc, const uint8_t *at, size_t size) {
    for (; size >= 8; at += 8, size -= 8) {
        const uint32_t low = crc ^ ((uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24);
        crc = tables[7][low & 0xff] ^ tables[6][low >> 8 & 0xff] ^ tables[5][low >> 16 & 0xff] ^ tables[4][low >> 24] ^
              tables[3][at[4]] ^ tables[2][at[5]] ^ tables[1][at[6]] ^ tables[0][at[7]];
    }
    for (; size > 0; at++, size--) {
        crc = crc >> 8 ^ tables[0][(crc ^ *at) & 0xff];
    }
    return crc;
}

#ifdef HAVE_AVX2
__attribute__((target("sse4.2"))) static uint32_t by_instruction(uint32_t crc, const uint8_t *at, size_t size) {
    uint64_t value = crc;
    for (; size >= 8; at += 8, size -= 8) {
        uint64_t bytes;
        memcpy(&bytes, at, 8);
        value = _mm_crc32_u64(value, bytes);
    }
    crc = (uint32_t)value;
    for (; size > 0; at++, size--) {
        crc = _mm_crc32_u8(crc, *at);
    }
    return crc;
}
#endif

static uint32_t checksum(const uint8_t *at, size_t size) {
#ifdef HAVE_AVX2
    if (__builtin_cpu_supports("sse4.2")) {
        return ~by_instruction(~0u, at, size);
    }
#endif
    return ~by_tables(~0u, at, size);
}

PyObject *crc32c(PyObject *self, PyObject *object) {
    Py_buffer data;
    uint32_t crc;
    (void)self;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    if (tables[0][1] == 0) {
        make_tables(); /* under the GIL */
    }
    if (data.len > KEEPS_THE_GIL) {
        Py_BEGIN_ALLOW_THREADS;
        crc = checksum(data.buf, (size_t)data.len);
        Py_END_ALLOW_THREADS;
    } else {
        crc = checksum(data.buf, (size_t)data.len);
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

/* What is left of a message. */
typedef struct {
    const uint8_t *at, *end;
} Span;

enum { VARINT = 0, FIXED64 = 1, BYTES = 2, FIXED32 = 5 };

static int fails(const char *what) {
    PyErr_SetString(PyExc_ValueError, what);
    return -1;
}

static int take_varint(Span *span, uint64_t *value) {
    *value = 0;
    for (int shift = 0; shift < 70; shift += 7) {
        if (span->at == span->end) {
            return fails("a number is cut off");
        }
        const uint8_t byte = *span->at++;
        if (shift == 63 && byte > 1) {
            break;
        }
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (byte < 0x80) {
            return 0;
        }
    }
    return fails("a number has more than 64 bits");
}

static int take_bytes(Span *span, Span *taken) {
    uint64_t size;
    if (take_varint(span, &size) < 0) {
        return -1;
    }
    if (size > (uint64_t)(span->end - span->at)) {
        return fails("a length reaches beyond what holds it");
    }
    taken->at = span->at;
    taken->end = span->at += size;
    return 0;
}

static int skip(Span *span, uint64_t size) {
    if (size > (uint64_t)(span->end - span->at)) {
        return fails("a value is cut off");
    }
    span->at += size;
    return 0;
}

/* The next field that has number `wanted` and type BYTES, or also `other` (-1: no other); 0 at the end. Others are left out. */
static int next_field(Span *span, uint64_t least, uint64_t most, int other, uint64_t *number, int *type, Span *taken) {
    while (span->at < span->end) {
        uint64_t tag, unused;
        if (take_varint(span, &tag) < 0) {
            return -1;
        }
        *number = tag >> 3;
        *type = (int)(tag & 7);
        if (tag >> 32 || *number == 0) {
            return fails("a field has no number that there is");
        }
        const int is_wanted = *number >= least && *number <= most;
        if (is_wanted && *type != BYTES && *type != other) {
            return fails("a field is not of its type");
        }
        if (*type == BYTES) {
            if (take_bytes(span, taken) < 0) {
                return -1;
            }
        } else {
            taken->at = span->at;
            if (*type == VARINT ? take_varint(span, &unused) < 0
                                : *type == FIXED64 ? skip(span, 8) < 0
                                                   : *type == FIXED32 ? skip(span, 4) < 0 : fails("a field is a group") < 0) {
                return -1;
            }
            taken->end = span->at;
        }
        if (is_wanted) {
            return 1;
        }
    }
    return 0;
}

/* Appends to a list of bytes. */
static int add_bytes(Span span, PyObject *list) {
    uint64_t number;
    int type, status;
    Span taken;
    while ((status = next_field(&span, 1, 1, -1, &number, &type, &taken)) > 0) {
        PyObject *const bytes = PyBytes_FromStringAndSize((const char *)taken.at, taken.end - taken.at);
        status = bytes == NULL ? -1 : PyList_Append(list, bytes);
        Py_XDECREF(bytes);
        if (status < 0) {
            return -1;
        }
    }
    return status;
}

static int extend(PyObject *array, const void *data, size_t size) {
    const Py_ssize_t before = PyByteArray_GET_SIZE(array);
    if (PyByteArray_Resize(array, before + (Py_ssize_t)size) < 0) {
        return -1;
    }
    memcpy(PyByteArray_AS_STRING(array) + before, data, size);
    return 0;
}

/* Appends to a bytearray of float32 (little-endian, as all numbers here). */
static int add_floats(Span span, PyObject *array) {
    uint64_t number;
    int type, status;
    Span taken;
    while ((status = next_field(&span, 1, 1, FIXED32, &number, &type, &taken)) > 0) {
        if ((taken.end - taken.at) % 4 != 0) {
            return fails("a list of floats is cut off");
        }
        if (extend(array, taken.at, (size_t)(taken.end - taken.at)) < 0) {
            return -1;
        }
    }
    return status;
}

/* Appends to a bytearray of int64. */
static int add_integers(Span span, PyObject *array) {
    uint64_t number;
    int type, status;
    Span taken;
    while ((status = next_field(&span, 1, 1, VARINT, &number, &type, &taken)) > 0) {
        Py_ssize_t count = 0, before = PyByteArray_GET_SIZE(array);
        for (const uint8_t *at = taken.at; at < taken.end; at++) {
            count += *at < 0x80;
        }
        if (PyByteArray_Resize(array, before + 8 * count) < 0) {
            return -1;
        }
        for (char *to = PyByteArray_AS_STRING(array) + before; taken.at < taken.end; to += 8) {
            uint64_t value;
            if (take_varint(&taken, &value) < 0) {
                return -1;
            }
            memcpy(to, &value, 8);
        }
    }
    return status;
}

/* The values of a feature: a list of bytes, ("f", bytearray) or ("q", bytearray); NULL without an error if there are none. */
static PyObject *values_of(Span span) {
    PyObject *values = NULL;
    uint64_t number, before = 0;
    int type, status;
    Span taken;
    while ((status = next_field(&span, 1, 3, -1, &number, &type, &taken)) > 0) {
        if (number != before) { /* the last of several kinds holds */
            Py_XDECREF(values);
            before = number;
            values = number == 1 ? PyList_New(0) : PyByteArray_FromStringAndSize(NULL, 0);
            if (values == NULL) {
                return NULL;
            }
        }
        status = number == 1 ? add_bytes(taken, values) : number == 2 ? add_floats(taken, values) : add_integers(taken, values);
        if (status < 0) {
            break;
        }
    }
    if (status < 0) {
        Py_CLEAR(values);
    } else if (before > 1) {
        return Py_BuildValue("sN", before == 2 ? "f" : "q", values);
    }
    return values;
}

/* One entry of the map of features. */
static int add_feature(Span span, PyObject *wanted, PyObject *features) {
    uint64_t number;
    int type, status, is_wanted = 1;
    Span taken, name = {NULL, NULL}, feature = {NULL, NULL};
    while ((status = next_field(&span, 1, 2, -1, &number, &type, &taken)) > 0) {
        Span *const part = number == 1 ? &name : &feature;
        if (part->at != NULL) {
            return fails("a feature has two names or values");
        }
        *part = taken;
    }
    if (status < 0) {
        return -1;
    }
    PyObject *const key = PyUnicode_DecodeUTF8(name.at == NULL ? "" : (const char *)name.at, name.end - name.at, NULL);
    if (key == NULL || (wanted != Py_None && (is_wanted = PySequence_Contains(wanted, key)) < 0)) {
        status = -1;
    } else if (is_wanted) {
        PyObject *const values = values_of(feature);
        if (values != NULL) {
            status = PyDict_SetItem(features, key, values);
            Py_DECREF(values);
        } else {
            status = PyErr_Occurred() ? -1 : 0;
        }
    }
    Py_XDECREF(key);
    return status;
}

PyObject *parse_example(PyObject *self, PyObject *args) {
    Py_buffer data;
    PyObject *wanted, *features;
    uint64_t number;
    int type, status = -1;
    Span taken, entry;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*O", &data, &wanted)) {
        return NULL;
    }
    Span span = {data.buf, (const uint8_t *)data.buf + data.len};
    features = PyDict_New();
    while (features != NULL && (status = next_field(&span, 1, 2, -1, &number, &type, &taken)) > 0) {
        if (number == 2) {
            status = fails("it is a SequenceExample, not an Example");
        }
        while (status > 0 && (status = next_field(&taken, 1, 1, -1, &number, &type, &entry)) > 0) {
            if (add_feature(entry, wanted, features) < 0) {
                status = -1;
            } else {
                status = 1;
            }
        }
        if (status < 0) {
            break;
        }
    }
    if (status < 0) {
        Py_CLEAR(features);
    }
    PyBuffer_Release(&data);
    return features;
}
