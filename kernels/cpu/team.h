// Threads that go through the phases of a step together.

#pragma once

#include <omp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "numbers.h"

namespace skerry {

// Work of a phase is claimed piece by piece, so that a thread which lost its core does not hold up
// the others. Which thread does a piece never changes a result.
class Board {
  public:
    // Before the first phase: how many threads there are.
    void open(int threads) { threads_ = threads; }

    int threads() const { return threads_; }

    // The first of the next `count` unclaimed pieces of the present phase; pieces beyond the last
    // are given too.
    int64_t claim(int64_t count = 1) { return next_.fetch_add(count, std::memory_order_relaxed); }

    // The phase is over when all threads are here.
    void wait() {
        if (threads_ == 1) {
            next_.store(0, std::memory_order_relaxed);
            return;
        }
        int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins) {
            if (spins == SPINS) return wait_long(round);
            pause();
        }
    }

    // Nanoseconds that threads waited for others which had lost their cores.
    int64_t lost() const { return lost_.load(std::memory_order_relaxed); }

  private:
    using Clock = std::chrono::steady_clock;

    static constexpr int SPINS = 4000;
    static constexpr int64_t LONG_NS = 1000000;  // no piece of work takes so long

    void wait_long(int round) {
        const auto began = Clock::now();
        while (round_.load(std::memory_order_acquire) == round) std::this_thread::yield();
        const int64_t taken =
            std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - began).count();
        if (taken > LONG_NS) lost_.fetch_add(taken, std::memory_order_relaxed);
    }

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    int threads_ = 1;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
    std::atomic<int64_t> lost_{0};
};

// `work(board)` on `threads` threads, or as many of them as there may be. Returns `Board::lost`.
template <typename Work>
int64_t together(int threads, Work work) {
    Board board;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp single
        board.open(omp_get_num_threads());
        work(board);
    }
    return board.lost();
}

// `piece(first, last)` for all of `count` rows, `step` at a time. The phase ends.
template <typename Piece>
void for_rows(Board &board, int64_t count, int64_t step, Piece piece) {
    int64_t pieces = (count + step - 1) / step;
    for (int64_t at = board.claim(); at < pieces; at = board.claim())
        piece(at * step, std::min((at + 1) * step, count));
    board.wait();
}

}  // namespace skerry
