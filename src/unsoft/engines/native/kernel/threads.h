// Work items handed to threads one by one: OpenMP where the compiler has it (the pool that PyTorch uses), else std::thread.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#ifdef __linux__
#include <sys/mman.h>
#endif
#ifndef _OPENMP
#include <thread>
#include <vector>
#endif

// Calls body(next) on `threads` threads; each asks next() for the index of its next item until that is >= items.
template <class Body> static void share(int threads, int64_t items, Body body) {
    std::atomic<int64_t> counter{0};
    std::atomic<bool> exhausted{false};
    auto next = [&]() -> int64_t { return counter.fetch_add(1); };
    auto work = [&] {
        try {
            body(next);
        } catch (const std::bad_alloc &) {  // an exception must not leave a thread: it is thrown again below
            exhausted = true;
        }
    };
    if (threads > items) threads = int(items);
    if (threads <= 1) {
        work();
    } else {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
        work();
#else
        std::vector<std::thread> crew;
        for (int t = 1; t < threads; t++) crew.emplace_back(work);
        work();
        for (auto &worker : crew) worker.join();
#endif
    }
    if (exhausted) throw std::bad_alloc();
}

// Asks for large pages in fresh memory: touching many megabytes page by page can take as long as what is computed in them.
constexpr size_t LARGE_PAGE = size_t(1) << 21;
static void prefer_large_pages(void *data, size_t bytes) {
#ifdef __linux__
    const uintptr_t from = (uintptr_t(data) + 4095) & ~uintptr_t(4095), to = (uintptr_t(data) + bytes) & ~uintptr_t(4095);
    if (bytes >= 2 * LARGE_PAGE) (void)madvise((void *)from, to - from, MADV_HUGEPAGE);  // advice: it may be ignored
#else
    (void)data, (void)bytes;
#endif
}

template <class T> struct Buffer {  // uninitialised memory, aligned to a cache line
    T *data;
    explicit Buffer(size_t count) {
        size_t bytes = (count * sizeof(T) + 63) / 64 * 64, alignment = bytes >= 2 * LARGE_PAGE ? LARGE_PAGE : 64;
        data = bytes ? (T *)std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment) : nullptr;
        if (bytes && !data) throw std::bad_alloc();
        prefer_large_pages(data, bytes);
    }
    ~Buffer() { std::free(data); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    operator T *() const { return data; }
};
