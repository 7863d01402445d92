/* Kernels of a transformer on a CPU, computed in fp32; `cpu_kernels.py` compiles and calls them.
 *
 * A small model's step is hundreds of operations on tensors that fit into the cache. To begin each operation, and to
 * pass over memory once more, takes longer than the arithmetic. Each function here does a chain of them at once.
 *
 * Rows are divided over at most `threads` threads where the work is worth it. Each row is computed by one thread in one
 * order, and sums over rows are divided in the same way for any number of threads, so results do not depend on it. NaN
 * and infinities travel as in torch.
 *
 * `half` is 1 where the tensors are of bf16, 0 for fp32. Each number of bf16 is widened as it is read, and each result
 * is rounded once, to the nearest, as it is written (a sum over rows from fp64 to fp32 before).
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FEW 32768 /* elements for which a second thread is not worth its start */
#define BLOCK 64  /* rows that are summed in fp32 before their sum is added in fp64 */
#define PARTS 32  /* of a sum over rows, at most: more threads would find nothing to do */

/* Inlined, so that the compiler makes a loop for each value of `half`, `size` and so on that a caller names. */
#define INLINE static inline __attribute__((always_inline))

/* The number that 16 bits of bf16 stand for. */
INLINE float widened(uint16_t bits) {
    union {
        uint32_t bits;
        float value;
    } number;
    number.bits = (uint32_t)bits << 16;
    return number.value;
}

/* The nearest number of bf16. */
INLINE uint16_t rounded(float value) {
    union {
        float value;
        uint32_t bits;
    } number;
    number.value = value;
    uint32_t up = number.bits + 0x7fff + ((number.bits >> 16) & 1); /* to even where both are as near */
    return (uint16_t)(value != value ? 0x7fc0 : up >> 16);          /* a NaN stays one */
}

/* Number j of x. */
INLINE float at(const void *x, int64_t j, int half) {
    return half ? widened(((const uint16_t *)x)[j]) : ((const float *)x)[j];
}

/* Write `value` as number j of x. */
INLINE void put(void *x, int64_t j, float value, int half) {
    if (half)
        ((uint16_t *)x)[j] = rounded(value);
    else
        ((float *)x)[j] = value;
}

/* x from its number j on. */
INLINE const void *from(const void *x, int64_t j, int half) { return (const char *)x + j * (half ? 2 : 4); }
INLINE void *into(void *x, int64_t j, int half) { return (char *)x + j * (half ? 2 : 4); }

/* e^x within 2 units in the last place, for the compiler to vectorise; below e^-87 it stays there, from e^88.4 on it is
 * infinite. */
static inline float exp_of(float x) {
    x = x > 89.0f ? 89.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float k = rintf(x * 1.44269504f);
    float r = x - k * 0.693359375f; /* ln 2 in two parts: the first has few bits, so that k times it is exact */
    r = r + k * 2.12194440e-4f;
    float p = 1.0f / 5040.0f; /* the series of e^r: |r| < 0.35, so the next term is below 1e-8 */
    p = p * r + 1.0f / 720.0f;
    p = p * r + 1.0f / 120.0f;
    p = p * r + 1.0f / 24.0f;
    p = p * r + 1.0f / 6.0f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    union {
        int32_t bits;
        float value;
    } two_to_k;
    two_to_k.bits = ((int32_t)k + 127) * (1 << 23);
    return p * two_to_k.value;
}

/* One row of `rms_norm`. */
INLINE void norm_row(const void *x, const void *add, void *sum, const void *weight, void *out, float *scale, int64_t n,
                     float eps, int half) {
    float squares = 0.0f;
    if (add) {
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < n; j++) {
            float value = at(x, j, half) + at(add, j, half);
            put(sum, j, value, half);
            squares += value * value;
        }
    } else {
#pragma omp simd reduction(+ : squares)
        for (int64_t j = 0; j < n; j++)
            squares += at(x, j, half) * at(x, j, half);
    }
    float factor = 1.0f / sqrtf(squares / (float)n + eps);
    if (scale)
        *scale = factor;
    if (add) { /* the sum as it was before it was rounded */
#pragma omp simd
        for (int64_t j = 0; j < n; j++)
            put(out, j, (at(x, j, half) + at(add, j, half)) * factor * at(weight, j, half), half);
    } else {
#pragma omp simd
        for (int64_t j = 0; j < n; j++)
            put(out, j, at(x, j, half) * factor * at(weight, j, half), half);
    }
}

/* out = x / sqrt(mean(x^2) + eps) * weight for each of `rows` rows of n numbers, x's `stride` apart; x + add in x's
 * place, and kept in `sum`, where `add` is given; the factor of each row in `scale` [rows], where that is given. */
void rms_norm(const void *x, int64_t stride, const void *add, void *sum, const void *weight, void *out, float *scale,
              int64_t rows, int64_t n, float eps, int half, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > FEW)
    for (int64_t i = 0; i < rows; i++) {
        const void *row = from(x, i * stride, half), *other = add ? from(add, i * n, half) : 0;
        void *both = add ? into(sum, i * n, half) : 0, *to = into(out, i * n, half);
        float *factor = scale ? scale + i : 0;
        if (half)
            norm_row(row, other, both, weight, to, factor, n, eps, 1);
        else
            norm_row(row, other, both, weight, to, factor, n, eps, 0);
    }
}

/* One row of `rms_norm_backward`; what it adds to the weight's gradient is added to `block`. */
INLINE void norm_row_backward(const void *x, const void *grad, const void *weight, float factor, void *grad_x,
                              float *block, int64_t n, int half) {
    float product = 0.0f;
#pragma omp simd reduction(+ : product)
    for (int64_t j = 0; j < n; j++) {
        float both = at(grad, j, half) * at(x, j, half);
        product += both * at(weight, j, half);
        block[j] += both * factor;
    }
    float back = product * factor * factor / (float)n;
#pragma omp simd
    for (int64_t j = 0; j < n; j++)
        put(grad_x, j, factor * (at(grad, j, half) * at(weight, j, half) - at(x, j, half) * back), half);
}

/* The gradients of `rms_norm` without `add`: of x [rows, n], whose rows are `stride` apart, and of the weight [n],
 * summed over the rows. Returns 0; 1: no memory. */
int rms_norm_backward(const void *x, int64_t stride, const void *grad, const void *weight, const float *scale,
                      void *grad_x, void *grad_weight, int64_t rows, int64_t n, int half, int threads) {
    int64_t parts = (rows + BLOCK / 4 - 1) / (BLOCK / 4);
    parts = parts > PARTS ? PARTS : parts;
    double *sums = calloc((size_t)(parts * n + 1), sizeof(double)); /* never of no bytes */
    float *blocks = calloc((size_t)(parts * n + 1), sizeof(float));
    if (!sums || !blocks) {
        free(sums);
        free(blocks);
        return 1;
    }
#pragma omp parallel for num_threads(threads) if (rows * n > FEW)
    for (int64_t part = 0; part < parts; part++) {
        double *sum = sums + part * n;
        float *block = blocks + part * n;
        int64_t first = rows * part / parts, end = rows * (part + 1) / parts;
        for (int64_t i = first; i < end; i++) {
            const void *row = from(x, i * stride, half), *grad_row = from(grad, i * n, half);
            void *to = into(grad_x, i * n, half);
            if (half)
                norm_row_backward(row, grad_row, weight, scale[i], to, block, n, 1);
            else
                norm_row_backward(row, grad_row, weight, scale[i], to, block, n, 0);
            if ((i - first) % BLOCK == BLOCK - 1 || i == end - 1)
                for (int64_t j = 0; j < n; j++) {
                    sum[j] += block[j];
                    block[j] = 0.0f;
                }
        }
    }
    for (int64_t j = 0; j < n; j++) {
        double total = 0.0;
        for (int64_t part = 0; part < parts; part++)
            total += sums[part * n + j];
        put(grad_weight, j, (float)total, half);
    }
    free(sums);
    free(blocks);
    return 0;
}

/* One row of `swiglu`. */
INLINE void swiglu_row(const void *gate, const void *up, void *out, int64_t n, int half) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        float x = at(gate, j, half);
        put(out, j, x / (1.0f + exp_of(-x)) * at(up, j, half), half);
    }
}

/* out [rows, n] = silu(gate) * up of `both` [rows, 2 n], the gate first. */
void swiglu(const void *both, void *out, int64_t rows, int64_t n, int half, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > FEW / 4)
    for (int64_t i = 0; i < rows; i++) {
        const void *gate = from(both, 2 * i * n, half), *up = from(both, (2 * i + 1) * n, half);
        void *to = into(out, i * n, half);
        if (half)
            swiglu_row(gate, up, to, n, 1);
        else
            swiglu_row(gate, up, to, n, 0);
    }
}

/* One row of `swiglu_backward`. */
INLINE void swiglu_row_backward(const void *gate, const void *up, const void *grad, void *grad_gate, void *grad_up,
                                int64_t n, int half) {
#pragma omp simd
    for (int64_t j = 0; j < n; j++) {
        float x = at(gate, j, half), back = at(grad, j, half), sigmoid = 1.0f / (1.0f + exp_of(-x));
        put(grad_gate, j, back * at(up, j, half) * sigmoid * (1.0f + x * (1.0f - sigmoid)), half);
        put(grad_up, j, back * x * sigmoid, half);
    }
}

/* The gradient of `swiglu` with respect to `both`. */
void swiglu_backward(const void *both, const void *grad, void *grad_both, int64_t rows, int64_t n, int half,
                     int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > FEW / 4)
    for (int64_t i = 0; i < rows; i++) {
        const void *gate = from(both, 2 * i * n, half), *up = from(both, (2 * i + 1) * n, half);
        const void *back = from(grad, i * n, half);
        void *to_gate = into(grad_both, 2 * i * n, half), *to_up = into(grad_both, (2 * i + 1) * n, half);
        if (half)
            swiglu_row_backward(gate, up, back, to_gate, to_up, n, 1);
        else
            swiglu_row_backward(gate, up, back, to_gate, to_up, n, 0);
    }
}

/* One head of one token of `rotate`. */
INLINE void rotate_head(const void *x, const void *cosines, const void *sines, float sign, void *out, int64_t size,
                        int64_t turned, int half) {
    int64_t pairs = turned / 2;
#pragma omp simd
    for (int64_t j = 0; j < pairs; j++) {
        float a = at(x, j, half), b = at(x, pairs + j, half);
        float c = at(cosines, j, half), s = sign * at(sines, j, half);
        put(out, j, a * c - b * s, half);
        put(out, pairs + j, b * c + a * s, half);
    }
    for (int64_t j = turned; j < size; j++)
        put(out, j, at(x, j, half), half);
}

/* Turn the first `turned` numbers of each head, halves against each other, by the token's angles; copy the others.
 *
 * x [rows, heads, size], tokens `stride` apart and heads `head_stride`; cosines and sines [any, turned / 2], rows
 * `angle_stride` apart, row i for token i, or row positions[i]; `sign` -1 turns back.
 * Returns 0; 2, with `out` unwritten: a token has no row among the `num_angles`. */
int rotate(const void *x, int64_t stride, int64_t head_stride, const void *cosines, const void *sines,
           int64_t angle_stride, int64_t num_angles, const int64_t *positions, float sign, void *out, int64_t rows,
           int64_t heads, int64_t size, int64_t turned, int half, int threads) {
    for (int64_t i = 0; positions && i < rows; i++)
        if (positions[i] < 0 || positions[i] >= num_angles)
            return 2;
    if (!positions && rows > num_angles)
        return 2;
#pragma omp parallel for num_threads(threads) if (rows * heads * size > FEW)
    for (int64_t i = 0; i < rows; i++) {
        int64_t place = positions ? positions[i] : i;
        const void *c = from(cosines, place * angle_stride, half), *s = from(sines, place * angle_stride, half);
        for (int64_t head = 0; head < heads; head++) {
            const void *one = from(x, i * stride + head * head_stride, half);
            void *to = into(out, (i * heads + head) * size, half);
            if (half)
                rotate_head(one, c, s, sign, to, size, turned, 1);
            else
                rotate_head(one, c, s, sign, to, size, turned, 0);
        }
    }
    return 0;
}

/* Row `slot` of a cache in fp32: where it is, or widened into `place`. */
INLINE const float *cached(const void *rows, int64_t step, int64_t slot, float *place, int64_t n, int half) {
    const void *row = from(rows, slot * step, half);
    if (!half)
        return row;
#pragma omp simd
    for (int64_t d = 0; d < n; d++)
        place[d] = at(row, d, 1);
    return place;
}

/* The attention of `count` queries of one key head over `length` keys, which are at table[0], table[1], ...; `row` has
 * place for the larger of `size` and `value_size`. */
INLINE void attend_one(const float *query, const void *keys, const void *values, int64_t key_step, int64_t value_step,
                       const int32_t *table, int64_t length, float *scores, float *row, float *out, int64_t count,
                       int64_t size, int64_t value_size, float scale, int half) {
    for (int64_t j = 0; j < length; j++) {
        const float *key = cached(keys, key_step, table[j], row, size, half);
        for (int64_t g = 0; g < count; g++) {
            const float *head = query + g * size;
            float score = 0.0f;
#pragma omp simd reduction(+ : score)
            for (int64_t d = 0; d < size; d++)
                score += head[d] * key[d];
            scores[g * length + j] = score * scale;
        }
    }
    for (int64_t g = 0; g < count; g++) {
        float *score = scores + g * length, largest = score[0], sum = 0.0f;
        float *to = out + g * value_size;
#pragma omp simd reduction(max : largest)
        for (int64_t j = 0; j < length; j++)
            largest = score[j] > largest ? score[j] : largest;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < length; j++) {
            float below = score[j] - largest;
            score[j] = below < -87.0f ? 0.0f : exp_of(below);
            sum += score[j];
        }
        float share = 1.0f / sum;
#pragma omp simd
        for (int64_t j = 0; j < length; j++)
            score[j] *= share;
        memset(to, 0, (size_t)value_size * sizeof(float));
    }
    for (int64_t j = 0; j < length; j++) {
        const float *value = cached(values, value_step, table[j], row, value_size, half);
        for (int64_t g = 0; g < count; g++) {
            float share = scores[g * length + j], *to = out + g * value_size;
#pragma omp simd
            for (int64_t d = 0; d < value_size; d++)
                to[d] += share * value[d];
        }
    }
}

/* One new token a request against the cache, read where it is: out [requests, heads, value_size].
 *
 * query   [requests, heads, size], requests `query_stride` apart
 * keys    [num_slots, groups, size], values [num_slots, groups, value_size]; `heads / groups` heads share a group
 * table   [num_rows, num_columns], rows `table_stride` apart: the slots of request i are the first lengths[i] of row
 *         rows[i]
 * window  the token sees so many before itself; < 0: all
 * Returns 0; 1: no memory; 2, with `out` unwritten: a row, a length or a slot is beyond its table. */
int attend_decode(const void *query, int64_t query_stride, const void *keys, const void *values, const int32_t *table,
                  int64_t table_stride, int64_t num_rows, int64_t num_columns, const int64_t *rows,
                  const int64_t *lengths, void *out, int64_t num_slots, int64_t requests, int64_t heads,
                  int64_t groups, int64_t size, int64_t value_size, int64_t window, float scale, int half,
                  int threads) {
    int64_t count = heads / groups, longest = 0, work = 0;
    for (int64_t i = 0; i < requests; i++) {
        if (rows[i] < 0 || rows[i] >= num_rows || lengths[i] < 0 || lengths[i] > num_columns)
            return 2;
        int64_t seen = window >= 0 && lengths[i] > window + 1 ? window + 1 : lengths[i];
        const int32_t *slots = table + rows[i] * table_stride + lengths[i] - seen;
        int is_outside = 0;
#pragma omp simd reduction(| : is_outside)
        for (int64_t j = 0; j < seen; j++)
            is_outside |= slots[j] < 0 || slots[j] >= num_slots;
        if (is_outside)
            return 2;
        longest = seen > longest ? seen : longest;
        work += seen;
    }
    threads = work * heads * size > 16 * FEW ? threads : 1;
    /* Of each thread: the scores, the answers and the queries in fp32, and a row of the cache. */
    int64_t most = size > value_size ? size : value_size, place = count * (longest + value_size + size) + most;
    float *places = malloc(((size_t)threads * place + 1) * sizeof(float)); /* never of no bytes */
    if (!places)
        return 1;
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int64_t i = 0; i < requests; i++)
        for (int64_t group = 0; group < groups; group++) {
            float *scores = places + (size_t)omp_get_thread_num() * place, *answers = scores + count * longest;
            float *queries = answers + count * value_size, *row = queries + count * size;
            int64_t length = lengths[i], first = window >= 0 && length > window + 1 ? length - window - 1 : 0;
            const int32_t *slots = table + rows[i] * table_stride + first;
            const void *head = from(query, i * query_stride + group * count * size, half);
            const void *key = from(keys, group * size, half), *value = from(values, group * value_size, half);
            void *to = into(out, (i * heads + group * count) * value_size, half);
            for (int64_t d = 0; half && d < count * size; d++)
                queries[d] = at(head, d, 1);
            const float *asked = half ? queries : head;
            float *answered = half ? answers : to;
#define ATTEND(SIZE, VALUE_SIZE, HALF)                                                                                 \
    attend_one(asked, key, value, groups *size, groups *value_size, slots, length - first, scores, row, answered,      \
               count, SIZE, VALUE_SIZE, scale, HALF)
#define ATTEND_EITHER(SIZE, VALUE_SIZE)                                                                                \
    do {                                                                                                               \
        if (half)                                                                                                      \
            ATTEND(SIZE, VALUE_SIZE, 1);                                                                               \
        else                                                                                                           \
            ATTEND(SIZE, VALUE_SIZE, 0);                                                                               \
    } while (0)
            if (size == 32 && value_size == 32)
                ATTEND_EITHER(32, 32);
            else if (size == 64 && value_size == 64)
                ATTEND_EITHER(64, 64);
            else if (size == 128 && value_size == 128)
                ATTEND_EITHER(128, 128);
            else
                ATTEND_EITHER(size, value_size);
            for (int64_t d = 0; half && d < count * value_size; d++)
                put(to, d, answered[d], 1);
        }
    free(places);
    return 0;
}
