/* CRC-32, the checksum of zip archives, by carry-less multiplication: four times as fast as zlib, which has no such code. */
#include "kernels.h"

#include <string.h>

#define POLYNOMIAL 0xEDB88320u /* bits reversed: the highest bit is the coefficient of x^0 */
#define KEEPS_THE_GIL (64 << 10)

#ifdef HAVE_AVX2

static uint32_t table[256];

static void make_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t value = i;
        for (int bit = 0; bit < 8; bit++) {
            value = value >> 1 ^ (value & 1 ? POLYNOMIAL : 0);
        }
        table[i] = value;
    }
}

static uint32_t bytewise(uint32_t crc, const uint8_t *at, size_t size) {
    for (size_t i = 0; i < size; i++) {
        crc = crc >> 8 ^ table[(crc ^ at[i]) & 0xff];
    }
    return crc;
}

/* The remainder of 128 bits that are followed by as many zeros as `powers` stands for, plus the bits that come there. */
__attribute__((target("pclmul,sse4.1"))) static inline __m128i fold(__m128i bits, __m128i powers, __m128i next) {
    const __m128i low = _mm_clmulepi64_si128(bits, powers, 0x00), high = _mm_clmulepi64_si128(bits, powers, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

static inline __m128i load(const uint8_t *at) {
    return _mm_loadu_si128((const __m128i *)at);
}

/* The method of Gopal et al., "Fast CRC computation for generic polynomials using PCLMULQDQ instruction" (Intel, 2009). The last 16
 * bytes are reduced byte by byte. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t folded(uint32_t crc, const uint8_t *at, size_t size) {
    /* x^(n + 32) and x^(n - 32) modulo the polynomial, reversed and shifted by one, for n of 512 and 128 bits */
    const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    uint8_t rest[16];
    __m128i sums[4];
    for (int i = 0; i < 4; i++) {
        sums[i] = load(at + 16 * i);
    }
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128((int)crc));
    for (at += 64, size -= 64; size >= 64; at += 64, size -= 64) {
        for (int i = 0; i < 4; i++) {
            sums[i] = fold(sums[i], by_512, load(at + 16 * i));
        }
    }
    __m128i sum = sums[0];
    for (int i = 1; i < 4; i++) {
        sum = fold(sum, by_128, sums[i]);
    }
    for (; size >= 16; at += 16, size -= 16) {
        sum = fold(sum, by_128, load(at));
    }
    _mm_storeu_si128((__m128i *)rest, sum);
    return bytewise(bytewise(0, rest, sizeof rest), at, size);
}

static uint32_t crc32_of(const uint8_t *at, size_t size) {
    return ~(size >= 64 ? folded(~0u, at, size) : bytewise(~0u, at, size));
}

PyObject *crc32(PyObject *self, PyObject *arg) {
    Py_buffer data;
    uint32_t crc;
    (void)self;
    if (PyObject_GetBuffer(arg, &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) {
        PyBuffer_Release(&data);
        Py_RETURN_NONE;
    }
    if (table[1] == 0) {
        make_table(); /* under the GIL */
    }
    if (data.len < KEEPS_THE_GIL) {
        crc = crc32_of(data.buf, (size_t)data.len);
    } else {
        Py_BEGIN_ALLOW_THREADS;
        crc = crc32_of(data.buf, (size_t)data.len);
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(crc);
}

/* Both while a block lies in the CPU's cache, and without the GIL in between, which a training loop would wait for. `address`:
 * that of a C function, which the caller answers for. With a fourth argument that is false there is no checksum, but 0. */
PyObject *hash_blocks(PyObject *self, PyObject *args) {
    Py_buffer data;
    Py_ssize_t block;
    unsigned long long address;
    int with_crc = 1;
    PyObject *hashes = NULL, *result = NULL;
    (void)self;
    if (!PyArg_ParseTuple(args, "y*nK|p", &data, &block, &address, &with_crc)) {
        return NULL;
    }
    if (block < 1 || address == 0) {
        PyErr_SetString(PyExc_ValueError, "blocks have at least one byte, and a hash has an address");
    } else {
        const Py_ssize_t count = data.len / block + (data.len % block != 0);
        hashes = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(uint64_t));
    }
    if (hashes != NULL) {
        const Hash hash = (Hash)(uintptr_t)address;
        const uint8_t *at = data.buf;
        char *to = PyBytes_AS_STRING(hashes);
        uint32_t crc = ~0u;
        if (table[1] == 0) {
            make_table(); /* under the GIL */
        }
        Py_BEGIN_ALLOW_THREADS;
        for (Py_ssize_t left = data.len; left > 0; left -= block, at += block, to += sizeof(uint64_t)) {
            const size_t size = (size_t)(left < block ? left : block);
            const uint64_t value = hash(at, size);
            memcpy(to, &value, sizeof value);
            if (with_crc) {
                crc = size >= 64 ? folded(crc, at, size) : bytewise(crc, at, size);
            }
        }
        Py_END_ALLOW_THREADS;
        result = Py_BuildValue("(NI)", hashes, with_crc ? (unsigned int)~crc : 0u);
    }
    PyBuffer_Release(&data);
    return result;
}

#else

PyObject *hash_blocks(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    PyErr_SetString(PyExc_NotImplementedError, "crc32 says that this CPU cannot");
    return NULL;
}

PyObject *crc32(PyObject *self, PyObject *arg) {
    (void)self;
    (void)arg;
    Py_RETURN_NONE;
}

#endif
