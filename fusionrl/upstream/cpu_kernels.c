/* Kernels of a transformer on a CPU, in fp32; `cpu_kernels.py` compiles and calls them.
 *
 * A small model's step is hundreds of operations on tensors that fit into the cache. To begin each operation, and to
 * pass over memory once more, takes longer than the arithmetic. Each function here does a chain of them at once.
 *
 * Rows are divided over at most `threads` threads where the work is worth it. Each row is computed by one thread in one
 * order, and sums over rows are divided in the same way for any number of threads, so results do not depend on it. NaN
 * and infinities travel as in torch.
 */

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define FEW 32768 /* elements for which a second thread is not worth its start */
#define BLOCK 64  /* rows that are summed in fp32 before their sum is added in fp64 */
#define PARTS 32  /* of a sum over rows, at most: more threads would find nothing to do */

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

/* out = x / sqrt(mean(x^2) + eps) * weight for each of `rows` rows of n numbers, x's `stride` apart; x + add in x's
 * place, and kept in `sum`, where `add` is given; the factor of each row in `scale` [rows], where that is given. */
void rms_norm(const float *x, int64_t stride, const float *add, float *sum, const float *weight, float *out,
              float *scale, int64_t rows, int64_t n, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > FEW)
    for (int64_t i = 0; i < rows; i++) {
        const float *row = x + i * stride;
        float *to = out + i * n;
        float squares = 0.0f;
        if (add) {
            const float *other = add + i * n;
            float *both = sum + i * n;
#pragma omp simd reduction(+ : squares)
            for (int64_t j = 0; j < n; j++) {
                float value = row[j] + other[j];
                both[j] = value;
                squares += value * value;
            }
            row = both;
        } else {
#pragma omp simd reduction(+ : squares)
            for (int64_t j = 0; j < n; j++)
                squares += row[j] * row[j];
        }
        float factor = 1.0f / sqrtf(squares / (float)n + eps);
        if (scale)
            scale[i] = factor;
#pragma omp simd
        for (int64_t j = 0; j < n; j++)
            to[j] = row[j] * factor * weight[j];
    }
}

/* The gradients of `rms_norm` without `add`: of x [rows, n], whose rows are `stride` apart, and of the weight [n],
 * summed over the rows. Returns 0; 1: no memory. */
int rms_norm_backward(const float *x, int64_t stride, const float *grad, const float *weight, const float *scale,
                      float *grad_x, float *grad_weight, int64_t rows, int64_t n, int threads) {
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
            const float *row = x + i * stride, *grad_row = grad + i * n;
            float *to = grad_x + i * n;
            float factor = scale[i], product = 0.0f;
#pragma omp simd reduction(+ : product)
            for (int64_t j = 0; j < n; j++) {
                float both = grad_row[j] * row[j];
                product += both * weight[j];
                block[j] += both * factor;
            }
            float back = product * factor * factor / (float)n;
#pragma omp simd
            for (int64_t j = 0; j < n; j++)
                to[j] = factor * (grad_row[j] * weight[j] - row[j] * back);
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
        grad_weight[j] = (float)total;
    }
    free(sums);
    free(blocks);
    return 0;
}

/* out [rows, n] = silu(gate) * up of `both` [rows, 2 n], the gate first. */
void swiglu(const float *both, float *out, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > FEW / 4)
    for (int64_t i = 0; i < rows; i++) {
        const float *gate = both + 2 * i * n, *up = gate + n;
        float *to = out + i * n;
#pragma omp simd
        for (int64_t j = 0; j < n; j++)
            to[j] = gate[j] / (1.0f + exp_of(-gate[j])) * up[j];
    }
}

/* The gradient of `swiglu` with respect to `both`. */
void swiglu_backward(const float *both, const float *grad, float *grad_both, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * n > FEW / 4)
    for (int64_t i = 0; i < rows; i++) {
        const float *gate = both + 2 * i * n, *up = gate + n, *grad_row = grad + i * n;
        float *grad_gate = grad_both + 2 * i * n, *grad_up = grad_gate + n;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            float sigmoid = 1.0f / (1.0f + exp_of(-gate[j]));
            grad_gate[j] = grad_row[j] * up[j] * sigmoid * (1.0f + gate[j] * (1.0f - sigmoid));
            grad_up[j] = grad_row[j] * gate[j] * sigmoid;
        }
    }
}

/* Turn the first `turned` numbers of each head, halves against each other, by the token's angles; copy the others.
 *
 * x [rows, heads, size], tokens `stride` apart and heads `head_stride`; cosines and sines [any, turned / 2], rows
 * `angle_stride` apart, row i for token i, or row positions[i]; `sign` -1 turns back.
 * Returns 0; 2, with `out` unwritten: a token has no row among the `num_angles`. */
int rotate(const float *x, int64_t stride, int64_t head_stride, const float *cosines, const float *sines,
           int64_t angle_stride, int64_t num_angles, const int64_t *positions, float sign, float *out, int64_t rows,
           int64_t heads, int64_t size, int64_t turned, int threads) {
    int64_t half = turned / 2;
    for (int64_t i = 0; positions && i < rows; i++)
        if (positions[i] < 0 || positions[i] >= num_angles)
            return 2;
    if (!positions && rows > num_angles)
        return 2;
#pragma omp parallel for num_threads(threads) if (rows * heads * size > FEW)
    for (int64_t i = 0; i < rows; i++) {
        int64_t place = positions ? positions[i] : i;
        const float *c = cosines + place * angle_stride, *s = sines + place * angle_stride;
        for (int64_t head = 0; head < heads; head++) {
            const float *from = x + i * stride + head * head_stride;
            float *to = out + (i * heads + head) * size;
#pragma omp simd
            for (int64_t j = 0; j < half; j++) {
                float a = from[j], b = from[half + j];
                to[j] = a * c[j] - b * (sign * s[j]);
                to[half + j] = b * c[j] + a * (sign * s[j]);
            }
            for (int64_t j = turned; j < size; j++)
                to[j] = from[j];
        }
    }
    return 0;
}

/* The attention of `count` queries of one key head over `length` keys, which are at table[0], table[1], ... */
static inline __attribute__((always_inline)) void attend_one(
    const float *query, const float *keys, const float *values, int64_t key_row, int64_t value_row,
    const int32_t *table, int64_t length, float *scores, float *out, int64_t count, int64_t size, int64_t value_size,
    float scale) {
    for (int64_t j = 0; j < length; j++) {
        const float *key = keys + table[j] * key_row;
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
        const float *value = values + table[j] * value_row;
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
int attend_decode(const float *query, int64_t query_stride, const float *keys, const float *values,
                  const int32_t *table, int64_t table_stride, int64_t num_rows, int64_t num_columns,
                  const int64_t *rows, const int64_t *lengths, float *out, int64_t num_slots, int64_t requests,
                  int64_t heads, int64_t groups, int64_t size, int64_t value_size, int64_t window, float scale,
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
    float *all_scores = malloc(((size_t)threads * count * longest + 1) * sizeof(float)); /* never of no bytes */
    if (!all_scores)
        return 1;
#pragma omp parallel for collapse(2) num_threads(threads)
    for (int64_t i = 0; i < requests; i++)
        for (int64_t group = 0; group < groups; group++) {
            float *scores = all_scores + (size_t)omp_get_thread_num() * count * longest;
            int64_t length = lengths[i], first = window >= 0 && length > window + 1 ? length - window - 1 : 0;
            const int32_t *slots = table + rows[i] * table_stride + first;
            const float *head = query + i * query_stride + group * count * size;
            const float *key = keys + group * size, *value = values + group * value_size;
            float *to = out + (i * heads + group * count) * value_size;
#define ATTEND(SIZE, VALUE_SIZE)                                                                                       \
    attend_one(head, key, value, groups *size, groups *value_size, slots, length - first, scores, to, count, SIZE,    \
               VALUE_SIZE, scale)
            if (size == 32 && value_size == 32)
                ATTEND(32, 32);
            else if (size == 64 && value_size == 64)
                ATTEND(64, 64);
            else if (size == 128 && value_size == 128)
                ATTEND(128, 128);
            else
                ATTEND(size, value_size);
        }
    free(all_scores);
    return 0;
}
