/* Kernels for bytes and pixels. Each call releases the GIL at most once: with two busy threads every exchange of the GIL costs
 * tens of microseconds, so what takes less than 20 us keeps it.
 *
 *     read_range(path, start, buffer, around)                open, fstat, pread, close; with `around` past the page cache
 *     read_hashed(path, start, buffer, block, address, around)   the same, and the hash of every block, still in the cache
 *     read_many(path_of, keys, starts, lengths, etags, offsets, buffer)   the same for many ranges, neighbours in one call
 *     cut(buffer, lengths)                                   the parts of a buffer as bytes
 *     tar_run(data, offset, end, size)                       the plain members in a part of a tar
 *     group_names(names, num)                                the samples that members form
 *     whole_jpeg_size(data)                                  a JPEG's size, if its segments and its end are there
 *     gather_ranges(path, starts, length, buffer)            open, fstat, a pread for every run of adjacent ranges, close
 *     scatter_ranges(path, starts, lengths, offsets, buffer) the same for ranges that differ in length, each to its offset
 *     write_normalized(slots, first, images, scale, shift)   float32 planes, value * scale + shift; None is left out
 *     write_planes(slots, slot, pixels)                      uint8 planes
 *     resample([(target, pixels, part, antialias), ...])     bilinear, where the CPU has AVX2
 *     permute(values, sizes, a, b, keys)                     keyed bijections, four times as fast as NumPy
 *     interleave(lags, weights, sources, places)             which source has the next turns
 *     interleave_lengths(lags, weights, lengths, nexts, ends, rows) -> number of turns   the same, of unequal length
 *     best_fit(sizes, capacity, bounds, bins, counts)        packs documents into bins, window by window
 *     mark_documents(lengths, firsts, length, ...)           positions and documents of the tokens of bins, and where these begin
 *     take_pieces(samples, firsts, lengths, places, ...)     the pieces of some sequences
 *     members(indices, offsets, num_members, ...)            the ranges of the members of samples in tars
 *     texts(data, ends, places)                              some of the texts of a packed table
 *     crc32c(data)                                           where the CPU has SSE4.2, at its speed
 *     parse_example(data, wanted)                            the features of a tf.train.Example
 *     fill_part(memory, rows, block, hashes, is_hashed, address)   a part of a file from pieces, with checksums and hashes, where
 *                                                            the CPU has PCLMULQDQ
 *     StateClock                                             a worker's time by state
 *     delayed()                                              the time that this thread was runnable without a CPU
 *     gil_wait(sleep_s)                                      the time that a waking thread waits for the GIL
 *     wait_to_sample(sleep_s, thread, stat_file, signal)     wakes a thread that samples another one, unless that one did it
 *     take_sample()                                          what that one asks first
 *
 * Slots are C-contiguous [B, 3, H, W]; pixels are [H, W, 3] with packed rows any distance apart; when written to slots, rows
 * may run backwards (a mirrored view). Multiplication and addition round separately, as in torch (the build forbids
 * contraction), so the result is the same to the last bit without this module. Float planes are written past the caches: a
 * slab is larger than they are, and reading its old content first would double the traffic (224 x 224: 35 to 45 us, against
 * 200 to 240 in torch).
 */
#ifndef LOADERKIT_KERNELS_H
#define LOADERKIT_KERNELS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__)
#define HAVE_AVX2 1
#include <immintrin.h>
#endif

static inline int have_avx2(void) {
#ifdef HAVE_AVX2
    return __builtin_cpu_supports("avx2");
#else
    return 0;
#endif
}

/* The view of pixels, uint8 [H, W, 3] with packed rows; -1 with a ValueError for anything else. */
int get_pixels(PyObject *object, Py_buffer *view, int may_be_mirrored);

/* One column: `count` numbers of 8 bytes, or one that holds for all (then *step is 0); any count if that is -1. -1 with a
 * ValueError. */
int get_column(PyObject *object, Py_buffer *view, Py_ssize_t count, int flags, Py_ssize_t *step);

PyObject *write_normalized(PyObject *self, PyObject *args);
PyObject *write_planes(PyObject *self, PyObject *args);
PyObject *read_many(PyObject *self, PyObject *args);
PyObject *cut(PyObject *self, PyObject *args);
PyObject *read_range(PyObject *self, PyObject *args);
PyObject *read_hashed(PyObject *self, PyObject *args);
PyObject *gather_ranges(PyObject *self, PyObject *args);
PyObject *scatter_ranges(PyObject *self, PyObject *args);
PyObject *tar_run(PyObject *self, PyObject *args);
PyObject *group_names(PyObject *self, PyObject *args);
PyObject *whole_jpeg_size(PyObject *self, PyObject *data);
PyObject *resample(PyObject *self, PyObject *list);
typedef uint64_t (*Hash)(const void *data, size_t length); /* a function whose address Python gives */

PyObject *fill_part(PyObject *self, PyObject *args);
PyObject *permute(PyObject *self, PyObject *args);
PyObject *interleave(PyObject *self, PyObject *args);
PyObject *interleave_lengths(PyObject *self, PyObject *args);
PyObject *best_fit(PyObject *self, PyObject *args);
PyObject *mark_documents(PyObject *self, PyObject *args);
PyObject *take_pieces(PyObject *self, PyObject *args);
PyObject *members(PyObject *self, PyObject *args);
PyObject *texts(PyObject *self, PyObject *args);
PyObject *crc32c(PyObject *self, PyObject *data);
PyObject *parse_example(PyObject *self, PyObject *args);
PyObject *delayed(PyObject *self, PyObject *args);
PyObject *gil_wait(PyObject *self, PyObject *arg);
PyObject *wait_to_sample(PyObject *self, PyObject *args);
PyObject *take_sample(PyObject *self, PyObject *unused);


extern PyType_Spec state_clock_spec;

#endif
