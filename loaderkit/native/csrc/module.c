/* The module's table. */
#include "kernels.h"

static PyMethodDef methods[] = {
    {"resample", resample, METH_O, "resample([(target, pixels, part, antialias), ...]) -> whether this CPU can"},
    {"fill_part", fill_part, METH_VARARGS,
     "fill_part(memory, rows, block, hashes, is_hashed, address) -> s that hashes took, None where the CPU cannot"},
    {"read_range", read_range, METH_VARARGS, "read_range(path, start, buffer, around) -> (bytes read, mode, size, mtime_ns)"},
    {"read_hashed", read_hashed, METH_VARARGS, "read_hashed(path, start, buffer, block, address, around) -> (the same, hashes of blocks, s they took)"},
    {"read_many", read_many, METH_VARARGS, "read_many(path_of, keys, starts, lengths, etags, offsets, buffer) -> places that failed, or None"},
    {"cut", cut, METH_VARARGS, "cut(buffer, lengths) -> list of bytes"},
    {"tar_run", tar_run, METH_VARARGS, "tar_run(data, offset, end, size) -> (names, starts, sizes, next offset)"},
    {"group_names", group_names, METH_VARARGS, "group_names(names, num) -> the samples that members of a tar make"},
    {"whole_jpeg_size", whole_jpeg_size, METH_O, "whole_jpeg_size(data) -> (height, width), None unless it is a whole JPEG"},
    {"gather_ranges", gather_ranges, METH_VARARGS, "gather_ranges(path, starts, length, buffer) -> as read_range"},
    {"scatter_ranges", scatter_ranges, METH_VARARGS, "scatter_ranges(path, starts, lengths, offsets, buffer) -> as read_range"},
    {"write_normalized", write_normalized, METH_VARARGS, "write_normalized(slots, first, images, scale, shift)"},
    {"write_planes", write_planes, METH_VARARGS, "write_planes(slots, slot, pixels)"},
    {"permute", permute, METH_VARARGS, "permute(values, sizes, a, b, keys): positions become their images, in place"},
    {"interleave", interleave, METH_VARARGS, "interleave(lags, weights, sources, places): whose turn it is, and which of its own"},
    {"interleave_lengths", interleave_lengths, METH_VARARGS,
     "interleave_lengths(lags, weights, lengths, nexts, ends, rows) -> number of turns: whose turn it is, if they differ in length"},
    {"best_fit", best_fit, METH_VARARGS, "best_fit(sizes, capacity, bounds, bins, counts): bins of sizes, window by window"},
    {"mark_documents", mark_documents, METH_VARARGS, "mark_documents(lengths, firsts, length, positions, documents, tokens, begin, starts, ends)"},
    {"take_pieces", take_pieces, METH_VARARGS, "take_pieces(samples, firsts, lengths, places, bounds, sequences, length) -> bytes of int64"},
    {"texts", texts, METH_VARARGS, "texts(data, ends, places) -> list of str"},
    {"crc32c", crc32c, METH_O, "crc32c(data) -> int"},
    {"parse_example", parse_example, METH_VARARGS, "parse_example(data, wanted) -> dict of lists of bytes, or of (type, numbers as bytes)"},
    {"members", members, METH_VARARGS, "members(indices, offsets, num_members, starts, sizes, firsts, keys, etags) -> lists of keys, starts, sizes, etags"},
    {"delayed", delayed, METH_NOARGS, "delayed() -> s that this thread was ready to run with no CPU free"},
    {"gil_wait", gil_wait, METH_O, "gil_wait(sleep_s) -> s that this thread, woken up, waited for the GIL"},
    {"wait_to_sample", wait_to_sample, METH_VARARGS, "wait_to_sample(sleep_s, thread, stat_file, signal) -> whether the caller has to sample"},
    {"take_sample", take_sample, METH_NOARGS, "take_sample() -> whether one is due, which is then the caller's"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", "Moving bytes and pixels, the order's arithmetic, and accounts.", -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) {
    PyObject *self = PyModule_Create(&module), *state_clock = PyType_FromSpec(&state_clock_spec);
    if (self == NULL || state_clock == NULL || PyModule_AddObjectRef(self, "StateClock", state_clock) < 0) {
        Py_CLEAR(self);
    }
    Py_XDECREF(state_clock);
    return self;
}
