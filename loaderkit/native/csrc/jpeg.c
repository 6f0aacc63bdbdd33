/* loaderkit.native._jpeg: decodes a part of a JPEG through libjpeg-turbo.
 *
 * Every byte is parsed, so that damage is noticed wherever the part lies; only the blocks of the part become pixels. It is a
 * separate module, so that the others need no libjpeg. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <setjmp.h>
#include <stdio.h>
#include <time.h>

#include <jpeglib.h>

#include <jerror.h>

#if !defined(LIBJPEG_TURBO_VERSION_NUMBER) || LIBJPEG_TURBO_VERSION_NUMBER < 2001000
#error "libjpeg-turbo 2.1 or later is needed"
#endif

#define CONTEXT 2 /* columns beside the part that smooth chroma upsampling reads; libjpeg adds the rows itself */
#define BESIDE 32 /* the most extra columns written: the context on both sides, and the rest of the first block */
#define ROWS_A_CALL 8
#define SMOOTHED 10 /* coefficients of a block that libjpeg estimates from its neighbours if they are incomplete */

typedef struct {
    struct jpeg_error_mgr manager; /* first, as libjpeg passes a pointer to it */
    jmp_buf where;
    volatile int is_cut; /* a scan ended before its last block, or the file before its end marker */
} Errors;

typedef struct {
    JDIMENSION step, top, left, height, width;
    uint8_t *pixels;
    size_t size;
    JDIMENSION first_column, num_columns; /* of the rows that were written */
} Piece;

static void give_up(j_common_ptr decoder) {
    longjmp(((Errors *)decoder->err)->where, 1);
}

static void count_warning(j_common_ptr decoder, int level) {
    const int code = decoder->err->msg_code;
    decoder->err->num_warnings += level < 0;
    ((Errors *)decoder->err)->is_cut |= level < 0 && (code == JWRN_HIT_MARKER || code == JWRN_JPEG_EOF);
}

/* True if the part lies in the picture, and the chroma subsampling is a common one; others are decoded whole. */
static int is_usual(const struct jpeg_decompress_struct *decoder, const Piece *piece) {
    const int is_inside = piece->height > 0 && piece->width > 0 && piece->top < decoder->output_height &&
                          piece->height <= decoder->output_height - piece->top && piece->left < decoder->output_width &&
                          piece->width <= decoder->output_width - piece->left;
    const jpeg_component_info *all = decoder->comp_info;
    int has_usual_chroma = decoder->num_components == 1;
    if (decoder->num_components == 3) {
        has_usual_chroma = all[0].h_samp_factor <= 2 && all[0].v_samp_factor <= 2 && all[1].h_samp_factor == 1 &&
                           all[1].v_samp_factor == 1 && all[2].h_samp_factor == 1 && all[2].v_samp_factor == 1;
    }
    return is_inside && has_usual_chroma;
}

/* True if no block is estimated from its neighbours, as in a progressive file without its last scans: at the part's edges the
 * estimate would differ from that of the whole. */
static int is_complete(const struct jpeg_decompress_struct *decoder) {
    for (int c = 0; decoder->coef_bits != NULL && c < decoder->num_components; c++) {
        for (int k = 0; k < SMOOTHED; k++) {
            if (decoder->coef_bits[c][k] != 0) {
                return 0;
            }
        }
    }
    return 1;
}

/* Decodes the rows of the part, and discards the rows below it. */
static int read_rows(struct jpeg_decompress_struct *decoder, Piece *piece) {
    JSAMPROW rows[ROWS_A_CALL];
    const JDIMENSION end = piece->left + piece->width;
    piece->first_column = piece->left < CONTEXT ? 0 : piece->left - CONTEXT;
    piece->num_columns = (end + CONTEXT < decoder->output_width ? end + CONTEXT : decoder->output_width) - piece->first_column;
    jpeg_crop_scanline(decoder, &piece->first_column, &piece->num_columns); /* widens it to whole blocks, to the left */
    const size_t row_size = (size_t)piece->num_columns * 3;
    if (row_size * piece->height > piece->size) {
        return 0;
    }
    if (piece->top > 0) {
        jpeg_skip_scanlines(decoder, piece->top);
    }
    for (JDIMENSION done = 0; done < piece->height;) {
        JDIMENSION num = 0;
        for (; num < ROWS_A_CALL && done + num < piece->height; num++) {
            rows[num] = piece->pixels + row_size * (done + num);
        }
        done += jpeg_read_scanlines(decoder, rows, num);
    }
    const JDIMENSION rest = decoder->output_height - decoder->output_scanline;
    if (rest > 1) {
        jpeg_skip_scanlines(decoder, rest - 1); /* skipping all of them would not parse them */
    }
    if (rest > 0) {
        rows[0] = (*decoder->mem->alloc_small)((j_common_ptr)decoder, JPOOL_IMAGE, row_size);
        jpeg_read_scanlines(decoder, rows, 1);
    }
    return 1;
}

/* True if the part was decoded without an error or warning of libjpeg. */
static int decode_piece(const uint8_t *data, size_t size, Piece *piece) {
    struct jpeg_decompress_struct decoder;
    Errors errors = {.is_cut = 0};
    volatile int is_done = 0;
    decoder.err = jpeg_std_error(&errors.manager);
    errors.manager.error_exit = give_up;
    errors.manager.emit_message = count_warning;
    if (setjmp(errors.where)) {
        jpeg_destroy_decompress(&decoder);
        return 0;
    }
    jpeg_create_decompress(&decoder);
    jpeg_mem_src(&decoder, data, size);
    jpeg_read_header(&decoder, TRUE);
    decoder.scale_num = 1;
    decoder.scale_denom = piece->step;
    decoder.out_color_space = JCS_RGB;
    jpeg_calc_output_dimensions(&decoder);
    if (is_usual(&decoder, piece)) {
        jpeg_start_decompress(&decoder);
        is_done = is_complete(&decoder) && read_rows(&decoder, piece) && jpeg_finish_decompress(&decoder) &&
                  errors.manager.num_warnings == 0;
    }
    jpeg_destroy_decompress(&decoder);
    return is_done;
}

typedef struct {
    Py_buffer data, buffer;
    Piece piece;
    int is_done;
    double took_s;
} Job;

/* Parses a tuple (data, step, (top, left, height, width), buffer, ...); -1 with an exception. */
static int take(PyObject *given, Job *job) {
    Piece *piece = &job->piece;
    PyObject *first = PyTuple_Check(given) ? PyTuple_GetSlice(given, 0, 4) : NULL;
    if (first == NULL) {
        PyErr_SetString(PyExc_TypeError, "a job is a tuple");
        return -1;
    }
    const int is_taken = PyArg_ParseTuple(first, "y*I(IIII)w*", &job->data, &piece->step, &piece->top, &piece->left, &piece->height,
                                          &piece->width, &job->buffer);
    Py_DECREF(first);
    piece->pixels = is_taken ? job->buffer.buf : NULL;
    piece->size = is_taken ? (size_t)job->buffer.len : 0;
    return is_taken ? 0 : -1;
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void decode_all(Job *jobs, Py_ssize_t count) {
    double since_s = now_s();
    for (Job *job = jobs; job < jobs + count; job++) {
        job->is_done = decode_piece(job->data.buf, (size_t)job->data.len, &job->piece);
        const double until_s = now_s();
        job->took_s = until_s - since_s;
        since_s = until_s;
    }
}

/* decode(jobs) -> list of (first column, number of columns, seconds). A job is a tuple that begins with (data, step, (top, left,
 * height, width), buffer), the piece counted in pixels of the picture decoded at 1/step. Rows are written packed, RGB, one below
 * another, top to top + height, of at least the columns asked for. No columns for whatever is not plain: the file may be
 * damaged, or all right. All of them without the GIL: what runs between two pictures finds no caches warm. */
static PyObject *decode(PyObject *self, PyObject *given) {
    (void)self;
    PyObject *all = PySequence_Tuple(given), *decoded = NULL;
    const Py_ssize_t count = all == NULL ? 0 : PyTuple_GET_SIZE(all);
    Job *jobs = all == NULL ? NULL : PyMem_Calloc((size_t)count + 1, sizeof(Job));
    Py_ssize_t num = 0;
    while (jobs != NULL && num < count && take(PyTuple_GET_ITEM(all, num), &jobs[num]) == 0) {
        num++;
    }
    if (jobs != NULL && num == count) {
        Py_BEGIN_ALLOW_THREADS;
        decode_all(jobs, num);
        Py_END_ALLOW_THREADS;
        decoded = PyList_New(num);
    } else if (all != NULL && jobs == NULL) {
        PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < num; i++) {
        const Piece *piece = &jobs[i].piece;
        const unsigned int num_columns = jobs[i].is_done ? piece->num_columns : 0;
        PyObject *one = decoded == NULL ? NULL : Py_BuildValue("(IId)", piece->first_column, num_columns, jobs[i].took_s);
        if (one == NULL) {
            Py_CLEAR(decoded);
        } else {
            PyList_SET_ITEM(decoded, i, one);
        }
        PyBuffer_Release(&jobs[i].data);
        PyBuffer_Release(&jobs[i].buffer);
    }
    PyMem_Free(jobs);
    Py_XDECREF(all);
    return decoded;
}

/* True if a file lacks blocks, which libjpeg fills with grey, or its end marker. False if libjpeg fails, as Pillow then decides. */
static int lacks_its_end(const uint8_t *data, size_t size) {
    struct jpeg_decompress_struct decoder;
    Errors errors = {.is_cut = 0};
    decoder.err = jpeg_std_error(&errors.manager);
    errors.manager.error_exit = give_up;
    errors.manager.emit_message = count_warning;
    if (setjmp(errors.where) == 0) {
        jpeg_create_decompress(&decoder);
        jpeg_mem_src(&decoder, data, size);
        jpeg_read_header(&decoder, TRUE);
        decoder.scale_denom = 8; /* every code is parsed, but few pixels are computed */
        jpeg_start_decompress(&decoder);
        const JDIMENSION row_size = decoder.output_width * (JDIMENSION)decoder.output_components;
        JSAMPROW row = (*decoder.mem->alloc_large)((j_common_ptr)&decoder, JPOOL_IMAGE, row_size);
        while (decoder.output_scanline < decoder.output_height) {
            jpeg_read_scanlines(&decoder, &row, 1);
        }
        jpeg_finish_decompress(&decoder);
    }
    jpeg_destroy_decompress(&decoder);
    return errors.is_cut;
}

/* is_cut(data) -> bool */
static PyObject *is_cut(PyObject *self, PyObject *object) {
    Py_buffer data;
    int is_cut;
    (void)self;
    if (PyObject_GetBuffer(object, &data, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS;
    is_cut = lacks_its_end(data.buf, (size_t)data.len);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&data);
    return PyBool_FromLong(is_cut);
}

static PyMethodDef methods[] = {
    {"decode", decode, METH_O, "decode([(data, step, (top, left, height, width), buffer, ...), ...]) -> list of (first column, columns, seconds)"},
    {"is_cut", is_cut, METH_O, "is_cut(data) -> whether a JPEG lacks blocks or its end marker"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_jpeg", "Pieces of JPEGs.", -1, methods, NULL, NULL, NULL, NULL};

/* True if the library loaded now has the struct sizes of the headers at build time. */
static int is_same_library(void) {
    struct jpeg_decompress_struct decoder;
    Errors errors;
    decoder.err = jpeg_std_error(&errors.manager);
    errors.manager.error_exit = give_up;
    if (setjmp(errors.where)) {
        return 0;
    }
    jpeg_create_decompress(&decoder);
    jpeg_destroy_decompress(&decoder);
    return 1;
}

PyMODINIT_FUNC PyInit__jpeg(void) {
    if (!is_same_library()) {
        PyErr_SetString(PyExc_ImportError, "libjpeg is of another version than the headers loaderkit was built with");
        return NULL;
    }
    PyObject *self = PyModule_Create(&module);
    if (self != NULL && PyModule_AddIntConstant(self, "BESIDE", BESIDE) < 0) {
        Py_CLEAR(self);
    }
    return self;
}
