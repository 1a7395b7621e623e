// y[t][n] = Σ_k x[t][k] · w[n][k], sixteen n at a time.
//
// A panel of 16 stored rows is unpacked once for many tokens: integers as [k/4][16 rows][4 bytes],
// floats as [k][16 rows]. Each lane of a vector then belongs to one output, and goes through k in
// order, block by block. Integer sums are exact; what follows is the same for every token.

#include "products.h"

#include "floats.h"
#include "tiles.h"

namespace skerry {

namespace {

constexpr int64_t PART_BYTES = 704 << 10;  // operands that are gone through for two panels: L2
constexpr int64_t FEW = 16;  // tokens below which panels are claimed several at a time:
constexpr int64_t RUNS = 4;  // so that each thread comes back this often

// Two panels, of which the second may be none.
void pair_product([[maybe_unused]] const Product &product, const Panel *const *panels,
                  int64_t count, const Operands &x, int64_t first, int64_t last, const Target &to,
                  uint8_t *scratch) {
#ifdef SKERRY_INTEGER
    const int64_t ahead = to.gated ? 16 : 32;
    auto integers = [&](int64_t i) { return !product.exact && panels[i]->kind <= Q4_1; };
    if (count == 2 && integers(0) && panels[0]->kind == panels[1]->kind)
        return panels_product<2>(panels, ahead, x, first, last, to, scratch);
    for (int64_t i = 0; i < count; ++i)
        if (integers(i))
            panels_product<1>(panels + i, ahead, x, first, last, to, scratch);
        else
            panel_product(*panels[i], x, first, last, to, scratch);
#else
    for (int64_t i = 0; i < count; ++i) panel_product(*panels[i], x, first, last, to, scratch);
#endif
}

}  // namespace

// Floats need 64 bytes a column; two panels of integers 40, and copies of those not whole 34.
int64_t panel_bytes(const Product &product) { return product.ins * 74 + 128; }

void multiply(Board &board, const Product &product, const Operands &x, int64_t tokens,
              const Target &to, uint8_t *scratch) {
    scratch += -uintptr_t(scratch) & 63;
    const int64_t bytes = product.ins * (product.exact ? 4 : 2) + product.ins / BLOCK * 12;
    const int64_t most = std::max<int64_t>(PART_BYTES / bytes, GROUP);
    const int64_t parts = std::max<int64_t>((tokens + most - 1) / most, 1);
    const int64_t rows = ((tokens + parts - 1) / parts + GROUP - 1) / GROUP * GROUP;
    const int64_t pairs = (product.panel_count + 1) / 2, pieces = tokens ? parts * pairs : 0;
    // A pair for few tokens takes less time than two threads need to agree on who takes it.
    const int64_t run = tokens < FEW ? std::max<int64_t>(pieces / (board.threads() * RUNS), 1) : 1;
    for (int64_t start = board.claim(run); start < pieces; start = board.claim(run))
        for (int64_t at = start; at < std::min(start + run, pieces); ++at) {
            const int64_t pair = at % pairs, first = at / pairs * rows;
            const Panel *panels[2];
            panels[0] = product.panels + (to.gated ? pair : 2 * pair);
            panels[1] = panels[0] + (to.gated ? pairs : 1);
            const int64_t count = to.gated || 2 * pair + 1 < product.panel_count ? 2 : 1;
            pair_product(product, panels, count, x, first, std::min(first + rows, tokens), to,
                         scratch);
        }
    board.wait();
}

void decode_row(int kind, const uint8_t *row, int64_t columns, float *out) {
    if (kind == Q8_0)
        decode_values<Q8_0>(row, columns, out);
    else if (kind == Q4_0)
        decode_values<Q4_0>(row, columns, out);
    else if (kind == Q4_1)
        decode_values<Q4_1>(row, columns, out);
    else if (kind == F32)
        decode_values<F32>(row, columns, out);
    else if (kind == F16)
        decode_values<F16>(row, columns, out);
    else
        decode_values<BF16>(row, columns, out);
}

}  // namespace skerry
