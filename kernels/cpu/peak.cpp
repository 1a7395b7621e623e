// How fast this core multiplies, for benchmarks to measure the kernels against.

#include <chrono>

#include "numbers.h"

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

extern "C" {

// Multiplications and additions a second of one core in the instruction that `multiply` is made
// of: of 8-bit integers, or of floats where there is none. The best of several tries.
double skerry_peak() {
    double best = 0;
#ifdef SKERRY_WIDE
    constexpr int ROUNDS = 20000, SUMS = 12;
    for (int attempt = 0; attempt < 50; ++attempt) {
        const auto began = Clock::now();
#ifdef SKERRY_INTEGER
        __m512i sums[SUMS], value = _mm512_set1_epi32(0x01010101);
        for (__m512i &sum : sums) sum = value;
        for (int i = 0; i < ROUNDS; ++i)
            for (__m512i &sum : sums) {
                asm volatile("" : "+v"(sum));  // or equal sums would be computed once
                sum = _mm512_dpbusd_epi32(sum, value, value);
            }
        constexpr double EACH = 128;
#else
        __m512 sums[SUMS], value = _mm512_set1_ps(1);
        for (__m512 &sum : sums) sum = value;
        for (int i = 0; i < ROUNDS; ++i)
            for (__m512 &sum : sums) {
                asm volatile("" : "+v"(sum));
                sum = _mm512_fmadd_ps(value, value, sum);
            }
        constexpr double EACH = 32;
#endif
        for (auto &sum : sums) asm volatile("" : "+v"(sum));
        const double taken = std::chrono::duration<double>(Clock::now() - began).count();
        best = std::max(best, ROUNDS * SUMS * EACH / taken);
    }
#endif
    return best;
}

}  // extern "C"
