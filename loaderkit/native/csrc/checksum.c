/* Parts of files, put together and hashed. CRC-32, the checksum of zip archives, is made by carry-less multiplication: four times as
 * fast as zlib, which has no such code. */
#include "kernels.h"

#include <string.h>
#include <time.h>

#define POLYNOMIAL 0xEDB88320u /* bits reversed: the highest bit is the coefficient of x^0 */
#define AHEAD 4096 /* bytes */
#define KEEPS_THE_GIL (256 << 10) /* bytes that are copied meanwhile */

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

static inline __m128i moved(uint8_t *to, const uint8_t *at) {
    const __m128i bits = load(at);
    if (to != at) {
        _mm_storeu_si128((__m128i *)to, bits);
    }
    return bits;
}

/* Copies 64 bytes or more to `to`, which may be where they are, on the way. The method of Gopal et al., "Fast CRC computation for generic
 * polynomials using PCLMULQDQ instruction" (Intel, 2009). The last 16 bytes are reduced byte by byte. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t folded(uint32_t crc, uint8_t *to, const uint8_t *at, size_t size) {
    /* x^(n + 32) and x^(n - 32) modulo the polynomial, reversed and shifted by one, for n of 512 and 128 bits */
    const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4), by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    uint8_t rest[16];
    __m128i sums[4];
    for (int i = 0; i < 4; i++) {
        sums[i] = moved(to + 16 * i, at + 16 * i);
    }
    sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128((int)crc));
    for (at += 64, to += 64, size -= 64; size >= 64; at += 64, to += 64, size -= 64) {
        _mm_prefetch((const char *)at + AHEAD, _MM_HINT_T0); /* the CPU does not by itself, from one page to the next */
        for (int i = 0; i < 4; i++) {
            sums[i] = fold(sums[i], by_512, moved(to + 16 * i, at + 16 * i));
        }
    }
    __m128i sum = sums[0];
    for (int i = 1; i < 4; i++) {
        sum = fold(sum, by_128, sums[i]);
    }
    for (; size >= 16; at += 16, to += 16, size -= 16) {
        sum = fold(sum, by_128, moved(to, at));
    }
    _mm_storeu_si128((__m128i *)rest, sum);
    memmove(to, at, size);
    return bytewise(bytewise(0, rest, sizeof rest), to, size);
}

/* The checksum of what comes before, and of bytes that are copied to `to`, or are there. */
static uint32_t crc32_after(uint32_t crc, uint8_t *to, const uint8_t *at, size_t size) {
    if (size < 64) {
        memmove(to, at, size);
        return ~bytewise(~crc, to, size);
    }
    return ~folded(~crc, to, at, size);
}

/* A row of `fill_part`. */
typedef struct {
    int64_t begin, end, from, crc;
} Piece;

typedef struct {
    uint8_t *memory;
    int64_t size, block;
    Piece *pieces, *last;
    const uint8_t *is_hashed;
    uint64_t *hashes;
    Hash hash;
} Part;

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Block by block, so that what is hashed lies in the CPU's cache. Returns the seconds that hashes took. */
static double fill(const Part *part) {
    double took_s = 0;
    Piece *piece = part->pieces;
    for (int64_t number = 0, begin = 0; begin < part->size; number++, begin += part->block) {
        const int64_t end = part->size - begin < part->block ? part->size : begin + part->block;
        for (; piece < part->last && piece->begin < end; piece++) {
            const int64_t lo = piece->begin > begin ? piece->begin : begin, hi = piece->end < end ? piece->end : end;
            uint8_t *const to = part->memory + lo;
            const uint8_t *from = piece->from == 0 ? to : (const uint8_t *)(uintptr_t)piece->from + (lo - piece->begin);
            if (piece->from == 0) {
                memset(to, 0, (size_t)(hi - lo));
            }
            if (piece->crc >= 0) {
                piece->crc = crc32_after((uint32_t)piece->crc, to, from, (size_t)(hi - lo));
            } else if (from != to) {
                memcpy(to, from, (size_t)(hi - lo));
            }
            if (piece->end > end) {
                break; /* it goes on in the next block */
            }
        }
        const double begin_s = seconds();
        if (part->is_hashed[number]) {
            part->hashes[number] = part->hash(part->memory + begin, (size_t)(end - begin));
        }
        took_s += seconds() - begin_s;
    }
    return took_s;
}

/* The bytes that are copied, and a quarter of those that are hashed, which take as long; -1 with a ValueError unless pieces lie in memory, one after the other. */
static int64_t work_of(const Part *part) {
    int64_t bytes = 0, end = 0;
    for (const Piece *piece = part->pieces; piece < part->last; end = piece->end, piece++) {
        if (piece->begin < end || piece->end < piece->begin || piece->end > part->size) {
            PyErr_SetString(PyExc_ValueError, "pieces lie in memory, in order");
            return -1;
        }
        bytes += piece->end - piece->begin;
    }
    for (int64_t begin = 0, number = 0; begin < part->size; begin += part->block) {
        bytes += part->is_hashed[number++] ? part->block / 4 : 0;
    }
    return bytes;
}

PyObject *fill_part(PyObject *self, PyObject *args) {
    Py_buffer memory, rows, hashes, is_hashed;
    Py_ssize_t block;
    unsigned long long address;
    PyObject *result = NULL;
    (void)self;
    if (!__builtin_cpu_supports("pclmul") || !__builtin_cpu_supports("sse4.1")) {
        Py_RETURN_NONE;
    }
    if (!PyArg_ParseTuple(args, "w*w*nw*y*K", &memory, &rows, &block, &hashes, &is_hashed, &address)) {
        return NULL;
    }
    const Py_ssize_t num_blocks = block < 1 ? -1 : memory.len / block + (memory.len % block != 0);
    if (address == 0 || rows.len % (Py_ssize_t)sizeof(Piece) != 0 || is_hashed.len != num_blocks ||
        hashes.len != num_blocks * (Py_ssize_t)sizeof(uint64_t)) {
        PyErr_SetString(PyExc_ValueError, "a block has at least one byte and a hash, a row four numbers, and a hash an address");
    } else {
        Piece *const pieces = rows.buf;
        const Part part = {memory.buf, memory.len, block, pieces, pieces + rows.len / (Py_ssize_t)sizeof(Piece), is_hashed.buf,
                           hashes.buf, (Hash)(uintptr_t)address};
        const int64_t bytes = work_of(&part);
        double took_s = 0;
        if (table[1] == 0) {
            make_table(); /* under the GIL */
        }
        if (bytes > KEEPS_THE_GIL) {
            Py_BEGIN_ALLOW_THREADS;
            took_s = fill(&part);
            Py_END_ALLOW_THREADS;
        } else if (bytes >= 0) {
            took_s = fill(&part);
        }
        result = bytes < 0 ? NULL : PyFloat_FromDouble(took_s);
    }
    PyBuffer_Release(&memory);
    PyBuffer_Release(&rows);
    PyBuffer_Release(&hashes);
    PyBuffer_Release(&is_hashed);
    return result;
}

#else

PyObject *fill_part(PyObject *self, PyObject *args) {
    (void)self;
    (void)args;
    Py_RETURN_NONE;
}

#endif
