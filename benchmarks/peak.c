/* Multiply-adds in registers alone: what one core can do where nothing waits for memory.
 *
 * Twelve chains that do not depend on one another hide the latency of each instruction.
 * int8 is done as every library does it without VNNI: pairs of u8 x s8 products are added in 16
 * bits, pairs of these in 32 bits, and the sums are added up.
 */
#include <immintrin.h>

#define CHAINS 12
#define KEEP(x) __asm__ volatile("" : "+x"(x))

/* 12 x 8 fused multiply-adds a round. */
__attribute__((target("avx2,fma"))) float fp32_rounds(long rounds) {
  __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(1e-3f), sums[CHAINS];
  for (int i = 0; i < CHAINS; i++) sums[i] = _mm256_set1_ps((float)i);
  for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) sums[i] = _mm256_fmadd_ps(sums[i], a, b);
  }
  for (int i = 1; i < CHAINS; i++) sums[0] = _mm256_add_ps(sums[0], sums[i]);
  return _mm256_cvtss_f32(sums[0]);
}

/* 12 x 32 multiply-adds of bytes a round. */
__attribute__((target("avx2"))) int int8_rounds(long rounds) {
  __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-5), ones = _mm256_set1_epi16(1);
  __m256i sums[CHAINS];
  for (int i = 0; i < CHAINS; i++) sums[i] = _mm256_set1_epi32(i);
  for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++) {
      KEEP(b); /* as if it had just been loaded, so that the product is made anew */
      __m256i pairs = _mm256_maddubs_epi16(a, b);
      sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, ones));
    }
  }
  for (int i = 1; i < CHAINS; i++) sums[0] = _mm256_add_epi32(sums[0], sums[i]);
  return _mm256_extract_epi32(sums[0], 0);
}
