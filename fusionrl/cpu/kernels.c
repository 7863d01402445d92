/* Kernels of a transformer on a CPU, computed in fp32; `kernels.py` compiles and calls them.
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
#define AHEAD 8   /* rows of a cache that are on their way from memory */
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

/* RMSNorm of each head of queries and keys, in their place: both [rows, heads, n], tokens `stride` apart, heads dense. */
static void norm_heads(void *query, int64_t query_stride, int64_t query_heads, const void *query_weight, void *key,
                       int64_t key_stride, int64_t key_heads, const void *key_weight, int64_t rows, int64_t n,
                       float eps, int half, int threads) {
    int64_t heads = query_heads + key_heads;
#pragma omp parallel for num_threads(threads) if (rows * heads * n > FEW)
    for (int64_t i = 0; i < rows; i++)
        for (int64_t head = 0; head < heads; head++) {
            int is_key = head >= query_heads;
            void *row = is_key ? into(key, i * key_stride + (head - query_heads) * n, half)
                               : into(query, i * query_stride + head * n, half);
            const void *weight = is_key ? key_weight : query_weight;
            if (half)
                norm_row(row, 0, 0, weight, row, 0, n, eps, 1);
            else
                norm_row(row, 0, 0, weight, row, 0, n, eps, 0);
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

/* `rotate` of queries and keys at once, [rows, heads, size] each with dense heads; a table has a row of cosines and
 * sines [turned / 2 each], one after the other, for each of `num_angles` positions.
 * Returns 0; 2, with nothing written: a token has no row. */
int rotate_both(const void *query, int64_t query_stride, int64_t query_heads, void *query_out, const void *key,
                int64_t key_stride, int64_t key_heads, void *key_out, const void *table, int64_t num_angles,
                const int64_t *positions, int64_t rows, int64_t size, int64_t turned, int half, int threads) {
    const void *sines = from(table, turned / 2, half);
    int code = rotate(query, query_stride, size, table, sines, turned, num_angles, positions, 1.0f, query_out, rows,
                      query_heads, size, turned, half, threads);
    if (code)
        return code;
    return rotate(key, key_stride, size, table, sines, turned, num_angles, positions, 1.0f, key_out, rows, key_heads,
                  size, turned, half, threads);
}

/* Write keys [rows, key_size] and values [rows, value_size], tokens `stride` apart, into the slots of a cache.
 * Returns 0; 2, with nothing written: a slot is beyond the cache. */
static int store_rows(const void *key, int64_t key_stride, const void *value, int64_t value_stride,
                      const int64_t *slots, void *keys, void *values, int64_t num_slots, int64_t rows,
                      int64_t key_size, int64_t value_size, int half, int threads) {
    for (int64_t i = 0; i < rows; i++)
        if (slots[i] < 0 || slots[i] >= num_slots)
            return 2;
    size_t width = half ? 2 : 4;
#pragma omp parallel for num_threads(threads) if (rows * (key_size + value_size) > 4 * FEW)
    for (int64_t i = 0; i < rows; i++) {
        memcpy(into(keys, slots[i] * key_size, half), from(key, i * key_stride, half), (size_t)key_size * width);
        memcpy(into(values, slots[i] * value_size, half), from(value, i * value_stride, half),
               (size_t)value_size * width);
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

/* Begin to read the row that comes AHEAD rows after row j: it may be anywhere, which no CPU foresees. */
INLINE void fetch(const void *rows, int64_t step, const int32_t *table, int64_t j, int64_t length, int64_t n,
                  int half) {
    if (j + AHEAD < length)
        for (int64_t byte = 0; byte < n * (half ? 2 : 4); byte += 64)
            __builtin_prefetch((const char *)from(rows, table[j + AHEAD] * step, half) + byte);
}

/* Softmax of n scores, in their place; the log of its sum. */
INLINE float softmax(float *score, int64_t n) {
    float largest = score[0], sum = 0.0f;
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < n; j++)
        largest = score[j] > largest ? score[j] : largest;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < n; j++) {
        float below = score[j] - largest;
        score[j] = below < -87.0f ? 0.0f : exp_of(below);
        sum += score[j];
    }
    float share = 1.0f / sum;
#pragma omp simd
    for (int64_t j = 0; j < n; j++)
        score[j] *= share;
    return largest + logf(sum);
}

/* The attention of `count` queries of one key head over `length` keys, which are at table[0], table[1], ...; `row` has
 * place for the larger of `size` and `value_size`. `sinks`: of each query a score without a key, or NULL. */
INLINE void attend_one(const float *query, const void *keys, const void *values, int64_t key_step, int64_t value_step,
                       const int32_t *table, int64_t length, const float *sinks, float *scores, float *row, float *out,
                       int64_t count, int64_t size, int64_t value_size, float scale, int half) {
    for (int64_t j = 0; j < length; j++) {
        fetch(keys, key_step, table, j, length, size, half);
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
        float log_sum = softmax(scores + g * length, length);
        float share = sinks ? 1.0f / (1.0f + expf(sinks[g] - log_sum)) : 1.0f;
        for (int64_t j = 0; sinks && j < length; j++)
            scores[g * length + j] *= share;
    }
    memset(out, 0, (size_t)(count * value_size) * sizeof(float));
    for (int64_t j = 0; j < length; j++) {
        fetch(values, value_step, table, j, length, value_size, half);
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
 * keys    [num_slots, groups, size], values [num_slots, groups, value_size], slots `value_step` apart; `heads / groups`
 *         heads share a group
 * table   [num_rows, num_columns], rows `table_stride` apart: the slots of request i are the first lengths[i] of row
 *         rows[i]
 * window  the token sees so many before itself; < 0: all
 * sinks   [heads] scores that take part in each softmax without a value; NULL: none
 * Returns 0; 1: no memory; 2, with `out` unwritten: a row, a length or a slot is beyond its table. */
int attend_decode(const void *query, int64_t query_stride, const void *keys, const void *values, const int32_t *table,
                  int64_t table_stride, int64_t num_rows, int64_t num_columns, const int64_t *rows,
                  const int64_t *lengths, const float *sinks, void *out, int64_t num_slots, int64_t requests,
                  int64_t heads, int64_t groups, int64_t size, int64_t value_size, int64_t value_step, int64_t window,
                  float scale, int half, int threads) {
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
    attend_one(asked, key, value, groups *size, value_step, slots, length - first, sinks ? sinks + group * count : 0,  \
               scores, row, answered, count, SIZE, VALUE_SIZE, scale, HALF)
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

/* The attention of a decode step from what its projection gave: norm of heads, rotation, the new keys and values into the
 * cache, attention. Arguments are those of the functions above, of one size of heads; besides:
 *
 * qkv                    [requests, (heads + 2 groups) * size], dense; its queries and keys are normed in their place
 * query_weight           and key_weight: of the norms; NULL: none
 * place                  [requests * (heads + groups) * size]: the turned queries, then the turned keys
 * Returns 0; 1: no memory; 2: a position, a slot, a row or a length is beyond its table. Where it is a row or a length, the
 * keys and values have been written. */
int attend_new(void *qkv, const void *query_weight, const void *key_weight, float eps, const void *angles,
               int64_t num_angles, int64_t turned, const int64_t *positions, void *place, const int64_t *slots,
               void *keys, void *values, const int32_t *table, int64_t table_stride, int64_t num_rows,
               int64_t num_columns, const int64_t *rows, const int64_t *lengths, void *out, int64_t num_slots,
               int64_t requests, int64_t heads, int64_t groups, int64_t size, int64_t window, float scale, int half,
               int threads) {
    int64_t stride = (heads + 2 * groups) * size;
    void *key = into(qkv, heads * size, half), *new_key = into(place, requests * heads * size, half);
    const void *value = from(qkv, (heads + groups) * size, half);
    if (query_weight)
        norm_heads(qkv, stride, heads, query_weight, key, stride, groups, key_weight, requests, size, eps, half,
                   threads);
    int code = rotate_both(qkv, stride, heads, place, key, stride, groups, new_key, angles, num_angles, positions,
                           requests, size, turned, half, threads);
    if (!code)
        code = store_rows(new_key, groups * size, value, stride, slots, keys, values, num_slots, requests,
                          groups * size, groups * size, half, threads);
    if (!code)
        code = attend_decode(place, heads * size, keys, values, table, table_stride, num_rows, num_columns, rows,
                             lengths, 0, out, num_slots, requests, heads, groups, size, size, groups * size, window,
                             scale, half, threads);
    return code;
}

/* A head of a gated delta net in fp32, `scale` long. */
INLINE void read_unit(const void *head, float *to, int64_t size, float scale, int half) {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t d = 0; d < size; d++)
        squares += at(head, d, half) * at(head, d, half);
    float factor = scale / sqrtf(squares + 1e-6f);
#pragma omp simd
    for (int64_t d = 0; d < size; d++)
        to[d] = at(head, d, half) * factor;
}

/* One new token a request of gated delta nets, out [requests, value_heads, value_size]: a state is scaled, gets nearer to
 * the token's value for its key, and is read by its query, in one pass over it.
 *
 * query        [requests, heads, size], key likewise, value [requests, value_heads, value_size]: of each, `strides` has
 *              the step from request to request; `value_heads / heads` heads share a query and a key
 * keep, share  [requests, value_heads] factor of the state, and part of the way to the value
 * states       [num_slots, value_heads, value_size, size], slots `slot_step` apart; slots[i] is that of request i
 * Returns 0; 1: no memory; 2, with nothing written: a slot is beyond the states. */
int delta_decode(const void *query, const void *key, const void *value, const int64_t *strides, const float *keep,
                 const float *share, float *states, int64_t slot_step, int64_t num_slots, const int64_t *slots,
                 void *out, int64_t requests, int64_t heads, int64_t value_heads, int64_t size, int64_t value_size,
                 int half, int threads) {
    for (int64_t i = 0; i < requests; i++)
        if (slots[i] < 0 || slots[i] >= num_slots)
            return 2;
    float *places = malloc(((size_t)threads * 2 * size + 1) * sizeof(float));
    if (!places)
        return 1;
#pragma omp parallel for collapse(2) num_threads(threads) if (requests * value_heads * value_size * size > FEW)
    for (int64_t i = 0; i < requests; i++)
        for (int64_t head = 0; head < value_heads; head++) {
            float *asked = places + omp_get_thread_num() * 2 * size, *known = asked + size;
            int64_t group = head * heads / value_heads, number = i * value_heads + head;
            read_unit(from(query, i * strides[0] + group * size, half), asked, size, 1.0f / sqrtf(size), half);
            read_unit(from(key, i * strides[1] + group * size, half), known, size, 1.0f, half);
            const void *values = from(value, i * strides[2] + head * value_size, half);
            float *state = states + slots[i] * slot_step + head * value_size * size;
            for (int64_t v = 0; v < value_size; v++) {
                float *row = state + v * size, found = 0.0f, answer = 0.0f;
#pragma omp simd reduction(+ : found)
                for (int64_t d = 0; d < size; d++)
                    found += row[d] * known[d];
                float change = share[number] * (at(values, v, half) - keep[number] * found);
#pragma omp simd reduction(+ : answer)
                for (int64_t d = 0; d < size; d++) {
                    row[d] = keep[number] * row[d] + change * known[d];
                    answer += row[d] * asked[d];
                }
                put(out, number * value_size + v, answer, half);
            }
        }
    free(places);
    return 0;
}

/* Attention of a training step: short sequences, all of whose tokens ask, with the backward pass.
 *
 * The tokens of all sequences stand in one packed row, which has a shared prompt once. Products are made for QUERIES
 * queries at once, so that each number of a key that is read serves all of them; LANES of their results at a time. */

#define LANES 16
#define QUERIES 4
#define ROUND(n) (((n) + LANES - 1) / LANES * LANES)
typedef float lanes __attribute__((vector_size(4 * LANES)));

/* out[q][j] = sum over d < size of left[q][d] * right[d][j], for QUERIES rows q and j < width, a multiple of LANES. */
INLINE void multiply(const float *left, int64_t left_step, const float *right, int64_t right_step, float *out,
                     int64_t out_step, int64_t size, int64_t width) {
    for (int64_t j = 0; j < width; j += LANES) {
        lanes a = {0}, b = {0}, c = {0}, d = {0};
        for (int64_t k = 0; k < size; k++) {
            lanes column = *(const lanes *)(right + k * right_step + j);
            a += left[k] * column;
            b += left[left_step + k] * column;
            c += left[2 * left_step + k] * column;
            d += left[3 * left_step + k] * column;
        }
        *(lanes *)(out + j) = a;
        *(lanes *)(out + out_step + j) = b;
        *(lanes *)(out + 2 * out_step + j) = c;
        *(lanes *)(out + 3 * out_step + j) = d;
    }
}

/* sums[j][d] += sum over QUERIES rows q of left[q][j] * right[q][d], for j < count and d < width. */
INLINE void add_outer(const float *left, int64_t left_step, const float *right, int64_t right_step, float *sums,
                      int64_t step, int64_t count, int64_t width) {
    for (int64_t k = 0; k < width; k += LANES) {
        lanes a = *(const lanes *)(right + k), b = *(const lanes *)(right + right_step + k);
        lanes c = *(const lanes *)(right + 2 * right_step + k), d = *(const lanes *)(right + 3 * right_step + k);
        for (int64_t j = 0; j < count; j++) {
            lanes *sum = (lanes *)(sums + j * step + k);
            lanes first = left[j] * a + left[left_step + j] * b;
            *sum += first + (left[2 * left_step + j] * c + left[3 * left_step + j] * d);
        }
    }
}

/* What `attend_rows` and its backward pass are given. */
typedef struct {
    const void *query, *key, *value;
    const int64_t *strides;
    const int32_t *places;
    const int64_t *starts, *firsts, *families;
    int64_t longest, heads, groups, size, value_size, window;
    float scale;
    int half;
} rows_of;

/* Numbers of the queries of all sequences: for a few, a second thread is not worth its start. */
INLINE int64_t rows_work(const rows_of *of, int64_t num_families) {
    return of->starts[of->families[num_families]] * of->heads * of->size;
}

/* Head `head` of token `place` of x, whose tokens are strides[0] apart and heads strides[1]. */
INLINE const void *head_of(const void *x, const int64_t *strides, int64_t place, int64_t head, int half) {
    return from(x, place * strides[0] + head * strides[1], half);
}

/* The numbers of a head in fp32, and zeros up to a multiple of LANES. */
INLINE void read_head(const void *head, float *to, int64_t size, int half) {
#pragma omp simd
    for (int64_t d = 0; d < size; d++)
        to[d] = at(head, d, half);
    for (int64_t d = size; d < ROUND(size); d++)
        to[d] = 0.0f;
}

/* Heads of a sequence's tokens as rows of ROUND(size), and as columns, `step` a row; columns beyond are zeros. */
INLINE void read_heads(const void *x, const int64_t *strides, const int32_t *places, int64_t length, int64_t group,
                       float *rows, float *columns, int64_t step, int64_t size, int half) {
    for (int64_t j = 0; j < length; j++)
        read_head(head_of(x, strides, places[j], group, half), rows + j * ROUND(size), size, half);
    for (int64_t d = 0; columns && d < size; d++) {
        for (int64_t j = 0; j < length; j++)
            columns[d * step + j] = rows[j * ROUND(size) + d];
        for (int64_t j = length; j < step; j++)
            columns[d * step + j] = 0.0f;
    }
}

/* The first token that the one at place `own` of its sequence sees. */
INLINE int64_t seen_from(const rows_of *of, int64_t own) {
    return of->window >= 0 && own > of->window ? own - of->window : 0;
}

/* Softmax of the products from `begin` to `end` of `width`, times `scale`, in their place, with zeros around them; the
 * log of its sum. */
INLINE float softmax_of(float *scores, int64_t begin, int64_t end, int64_t width, float scale) {
    for (int64_t j = 0; j < begin; j++)
        scores[j] = 0.0f;
#pragma omp simd
    for (int64_t j = begin; j < end; j++)
        scores[j] *= scale; /* rounded before they are compared: else the largest may be below itself */
    for (int64_t j = end; j < width; j++)
        scores[j] = 0.0f;
    return softmax(scores + begin, end - begin);
}

/* Memory of one thread, in floats: each part begins at a multiple of LANES. */
INLINE int64_t rows_place(const rows_of *of) {
    int64_t columns = ROUND(of->longest), size = ROUND(of->size), value_size = ROUND(of->value_size);
    return 3 * columns * (size + value_size) + QUERIES * (2 * columns + 2 * size + 2 * value_size);
}

/* The answers of one family of sequences, of the heads that share key head `group`. */
static void attend_family(const rows_of *of, int64_t family, int64_t group, void *out, float *logs, float *memory) {
    const int64_t *strides = of->strides, size = of->size, value_size = of->value_size;
    const int64_t count = of->heads / of->groups, key_step = ROUND(size), value_step = ROUND(value_size);
    const int half = of->half;
    for (int64_t row = of->families[family]; row < of->families[family + 1]; row++) {
        const int32_t *places = of->places + of->starts[row];
        int64_t length = of->starts[row + 1] - of->starts[row], first = of->firsts[row], columns = ROUND(length);
        float *keys = memory, *turned = keys + columns * key_step, *values = turned + columns * key_step;
        float *queries = values + columns * value_step, *scores = queries + QUERIES * key_step;
        float *answers = scores + QUERIES * columns;
        read_heads(of->key, strides + 2, places, length, group, keys, turned, columns, size, half);
        read_heads(of->value, strides + 4, places, length, group, values, 0, 0, value_size, half);
        int64_t asked = (length - first) * count;
        for (int64_t begin = 0; begin < asked; begin += QUERIES) {
            int64_t present = asked - begin < QUERIES ? asked - begin : QUERIES;
            /* Keys before `low` are in no window of these queries; scores begin with that of key `low`. */
            int64_t low = seen_from(of, first + begin / count) / LANES * LANES;
            int64_t seen = first + (begin + present - 1) / count + 1 - low, width = ROUND(seen);
            memset(queries, 0, (size_t)(QUERIES * key_step) * sizeof(float));
            for (int64_t q = 0; q < present; q++) {
                int64_t place = places[first + (begin + q) / count], head = group * count + (begin + q) % count;
                read_head(head_of(of->query, strides, place, head, half), queries + q * key_step, size, half);
            }
            multiply(queries, key_step, turned + low, columns, scores, columns, size, width);
            for (int64_t q = 0; q < present; q++) {
                int64_t own = first + (begin + q) / count, from_key = seen_from(of, own) - low;
                float log_sum = softmax_of(scores + q * columns, from_key, own + 1 - low, width, of->scale);
                logs[places[own] * of->heads + group * count + (begin + q) % count] = log_sum;
            }
            multiply(scores, columns, values + low * value_step, value_step, answers, value_step, seen, value_step);
            for (int64_t q = 0; q < present; q++) {
                int64_t place = places[first + (begin + q) / count], head = group * count + (begin + q) % count;
                void *to = into(out, (place * of->heads + head) * value_size, half);
#pragma omp simd
                for (int64_t d = 0; d < value_size; d++)
                    put(to, d, answers[q * value_step + d], half);
            }
        }
    }
}

/* The gradients of `attend_family`: those of keys and values are added to what `grad_key` and `grad_value` hold. */
static void attend_family_backward(const rows_of *of, int64_t family, int64_t group, const void *grad,
                                   const float *logs, void *grad_query, float *grad_key, float *grad_value,
                                   float *memory) {
    const int64_t *strides = of->strides, size = of->size, value_size = of->value_size;
    const int64_t count = of->heads / of->groups, key_step = ROUND(size), value_step = ROUND(value_size);
    const int64_t grad_strides[2] = {of->heads * value_size, value_size};
    const float scale = of->scale;
    const int half = of->half;
    for (int64_t row = of->families[family]; row < of->families[family + 1]; row++) {
        const int32_t *places = of->places + of->starts[row];
        int64_t length = of->starts[row + 1] - of->starts[row], first = of->firsts[row], columns = ROUND(length);
        float *keys = memory, *turned = keys + columns * key_step, *of_keys = turned + columns * key_step;
        float *values = of_keys + columns * key_step, *turned_values = values + columns * value_step;
        float *of_values = turned_values + columns * value_step, *queries = of_values + columns * value_step;
        float *of_queries = queries + QUERIES * key_step, *grads = of_queries + QUERIES * key_step;
        float *scores = grads + QUERIES * value_step, *of_scores = scores + QUERIES * columns;
        read_heads(of->key, strides + 2, places, length, group, keys, turned, columns, size, half);
        read_heads(of->value, strides + 4, places, length, group, values, turned_values, columns, value_size, half);
        memset(of_keys, 0, (size_t)(columns * key_step) * sizeof(float));
        memset(of_values, 0, (size_t)(columns * value_step) * sizeof(float));
        int64_t asked = (length - first) * count;
        for (int64_t begin = 0; begin < asked; begin += QUERIES) {
            int64_t present = asked - begin < QUERIES ? asked - begin : QUERIES;
            int64_t low = seen_from(of, first + begin / count) / LANES * LANES;
            int64_t seen = first + (begin + present - 1) / count + 1 - low, width = ROUND(seen);
            memset(queries, 0, (size_t)(QUERIES * key_step) * sizeof(float));
            memset(grads, 0, (size_t)(QUERIES * value_step) * sizeof(float));
            for (int64_t q = 0; q < present; q++) {
                int64_t place = places[first + (begin + q) / count], head = group * count + (begin + q) % count;
                read_head(head_of(of->query, strides, place, head, half), queries + q * key_step, size, half);
                read_head(head_of(grad, grad_strides, place, head, half), grads + q * value_step, value_size, half);
            }
            multiply(queries, key_step, turned + low, columns, scores, columns, size, width);
            multiply(grads, value_step, turned_values + low, columns, of_scores, columns, value_size, width);
            for (int64_t q = 0; q < QUERIES; q++) {
                int64_t own = first + (begin + q) / count, known = q < present ? own + 1 - low : 0;
                int64_t from_key = known ? seen_from(of, own) - low : 0;
                float *score = scores + q * columns, *of_score = of_scores + q * columns, product = 0.0f;
                float log_sum = known ? logs[places[own] * of->heads + group * count + (begin + q) % count] : 0.0f;
                for (int64_t j = 0; j < from_key; j++)
                    score[j] = of_score[j] = 0.0f;
#pragma omp simd reduction(+ : product)
                for (int64_t j = from_key; j < known; j++) {
                    float below = score[j] * scale - log_sum;
                    score[j] = below < -87.0f ? 0.0f : exp_of(below);
                    product += score[j] * of_score[j];
                }
#pragma omp simd
                for (int64_t j = from_key; j < known; j++)
                    of_score[j] = score[j] * (of_score[j] - product) * scale;
                for (int64_t j = known; j < width; j++)
                    score[j] = of_score[j] = 0.0f;
            }
            multiply(of_scores, columns, keys + low * key_step, key_step, of_queries, key_step, seen, key_step);
            for (int64_t q = 0; q < present; q++) {
                int64_t place = places[first + (begin + q) / count], head = group * count + (begin + q) % count;
                void *to = into(grad_query, (place * of->heads + head) * size, half);
#pragma omp simd
                for (int64_t d = 0; d < size; d++)
                    put(to, d, of_queries[q * key_step + d], half);
            }
            add_outer(of_scores, columns, queries, key_step, of_keys + low * key_step, key_step, seen, key_step);
            add_outer(scores, columns, grads, value_step, of_values + low * value_step, value_step, seen, value_step);
        }
        for (int64_t j = 0; j < length; j++) {
            float *to_key = grad_key + (places[j] * of->groups + group) * size;
            float *to_value = grad_value + (places[j] * of->groups + group) * value_size;
#pragma omp simd
            for (int64_t d = 0; d < size; d++)
                to_key[d] += of_keys[j * key_step + d];
#pragma omp simd
            for (int64_t d = 0; d < value_size; d++)
                to_value[d] += of_values[j * value_step + d];
        }
    }
}

/* Memory for all threads; NULL: there is none. */
INLINE float *rows_memory(const rows_of *of, int threads) {
    return aligned_alloc(4 * LANES, (size_t)(threads * rows_place(of) + LANES) * sizeof(float));
}

/* Causal attention of sequences in a packed row: out [tokens, heads, value_size].
 *
 * query     [tokens, heads, size], key [tokens, groups, size], value [tokens, groups, value_size]; `strides`: of query,
 *           key and value each, from token to token and from head to head
 * places    tokens of each sequence, in its order, one sequence after the other; sequence i has starts[i] .. starts[i +
 *           1] of them, at most `longest`
 * firsts    of sequence i the first firsts[i] tokens do not ask: an earlier sequence has the same
 * families  sequences families[i] .. families[i + 1] share tokens with each other, and with no others. A family is
 *           computed by one thread.
 * logs      [tokens, heads] log of the sum of each softmax, for the backward pass
 * window    a token sees so many before itself; < 0: all
 * Tokens of no sequence are left as they are. Returns 0; 1: no memory. */
int attend_rows(const void *query, const void *key, const void *value, const int64_t *strides, const int32_t *places,
                const int64_t *starts, const int64_t *firsts, const int64_t *families, int64_t num_families,
                int64_t longest, void *out, float *logs, int64_t heads, int64_t groups, int64_t size,
                int64_t value_size, int64_t window, float scale, int half, int threads) {
    rows_of of = {query,   key,   value,  strides, places,     starts, firsts, families,
                  longest, heads, groups, size,    value_size, window, scale,  half};
    float *memory = rows_memory(&of, threads);
    if (!memory)
        return 1;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (rows_work(&of, num_families) > FEW / 4)
    for (int64_t family = 0; family < num_families; family++)
        for (int64_t group = 0; group < groups; group++)
            attend_family(&of, family, group, out, logs, memory + omp_get_thread_num() * rows_place(&of));
    free(memory);
    return 0;
}

/* The gradients of `attend_rows`, for that of `out`, which is dense. A softmax may have had more terms in its sum than
 * these keys, without values: they are in `logs`. Those of keys [tokens, groups, size] and values
 * [tokens, groups, value_size] are fp32, whatever `half` says, and added to what is there. */
int attend_rows_backward(const void *grad, const void *query, const void *key, const void *value,
                         const int64_t *strides, const int32_t *places, const int64_t *starts, const int64_t *firsts,
                         const int64_t *families, int64_t num_families, int64_t longest, const float *logs,
                         void *grad_query, float *grad_key, float *grad_value, int64_t heads, int64_t groups,
                         int64_t size, int64_t value_size, int64_t window, float scale, int half, int threads) {
    rows_of of = {query,   key,   value,  strides, places,     starts, firsts, families,
                  longest, heads, groups, size,    value_size, window, scale,  half};
    float *memory = rows_memory(&of, threads);
    if (!memory)
        return 1;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(threads) if (rows_work(&of, num_families) > FEW / 4)
    for (int64_t family = 0; family < num_families; family++)
        for (int64_t group = 0; group < groups; group++)
            attend_family_backward(&of, family, group, grad, logs, grad_query, grad_key, grad_value,
                                   memory + omp_get_thread_num() * rows_place(&of));
    free(memory);
    return 0;
}
