// A CPU allocator for torch whose resident memory follows the live tensors.
//
// Buffers lie in one range of reserved addresses, without headers or gaps between them, so that a
// hole fits the size that it came from. The range consists of blocks, each of which is one huge
// page of the kernel. If a buffer needs a block that has no memory yet, the memory of an empty
// block is moved there (mremap: no copy, no page fault, no zeroes to write). The kernel provides
// more memory only if there is no empty block. So resident memory is the most that was ever in use
// at once, plus what is unused in partly used blocks, wherever the holes are. Above a limit, those
// blocks give up what they do not use, page by page.
//
// This is the virtual-address allocation of Sony's out-of-core paper (section 4), with the kernel's
// page tables in place of CUDA's.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4  // since Linux 5.7; the C library's headers may be older
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

using Address = std::uintptr_t;

constexpr std::size_t kBlockBytes = std::size_t{2} << 20;
constexpr std::size_t kAlignmentBytes = 512;  // direct I/O needs this; torch itself promises 64
constexpr std::size_t kPatienceBytes = 8 * kBlockBytes;
const std::size_t kPageBytes = sysconf(_SC_PAGESIZE);

void* map(void* where, std::size_t nbytes, int how) {
  constexpr int kKind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* range = mmap(where, nbytes, PROT_READ | PROT_WRITE, kKind | how, -1, 0);
  if (range == MAP_FAILED) return nullptr;
  madvise(range, nbytes, MADV_HUGEPAGE);
  return range;
}

// Moves the memory of one block to another, which has no memory.
bool move_block(void* from, void* to) {
  constexpr int kHow = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  return mremap(from, kBlockBytes, kBlockBytes, kHow, to) != MAP_FAILED;
}

std::size_t round_down(std::size_t nbytes, std::size_t unit) { return nbytes / unit * unit; }

std::size_t round_up(std::size_t nbytes, std::size_t unit) {
  return round_down(nbytes + unit - 1, unit);
}

struct Buffer {
  std::size_t nbytes, serial;
  bool watched;
};

struct Block {
  std::uint32_t used_bytes;
  std::uint32_t absent_bytes;  // given up in sweep number `sweep`, and not used since
  std::uint32_t sweep;
  bool resident;
  bool torn;     // split into small pages, because some were given up
  bool mapping;  // a separate mapping, because memory was once moved here
};

class Arena {
 public:
  // Manages `nbytes` of reserved addresses at `base`, both multiples of the block size. `blocks`
  // has one entry per block. At most `most_mappings` blocks ever receive moved memory: each of them
  // is then a mapping of the process, and the process needs other mappings, too.
  Arena(Address base, std::size_t nbytes, Block* blocks, std::size_t most_mappings)
      : base_(base), stop_(base + nbytes), most_mappings_(most_mappings), blocks_(blocks) {
    insert_hole(base, nbytes);
  }

  bool owns(const void* pointer) const {
    const auto address = reinterpret_cast<Address>(pointer);
    return base_ <= address && address < stop_;
  }

  // Allocates `nbytes`, at least 1 and less than the range. Returns null if there is no room.
  // `watched`: a profiler is informed of this buffer.
  void* take(std::size_t nbytes, bool watched) {
    const std::size_t size = round_up(nbytes, kAlignmentBytes);
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto hole = by_size_.lower_bound({size, 0});
    if (hole == by_size_.end()) return nullptr;
    const auto [length, start] = *hole;
    erase_hole(start, length);
    if (length > size) insert_hole(start + size, length - size);
    if (!occupy(start, size)) return nullptr;  // these addresses are lost
    used_.emplace(start, Buffer{nbytes, ++serial_, watched});
    live_bytes_ += size;
    peak_bytes_ = std::max(peak_bytes_, live_bytes_);
    if (resident_bytes() > threshold_bytes_) give_up();
    return reinterpret_cast<void*>(start);
  }

  void give(void* pointer) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto entry = used_.find(reinterpret_cast<Address>(pointer));
    if (entry == used_.end()) std::abort();  // freed twice, or not by its start address
    Address start = entry->first;
    std::size_t size = round_up(entry->second.nbytes, kAlignmentBytes);
    used_.erase(entry);
    live_bytes_ -= size;
    vacate(start, size);
    const auto after = by_address_.lower_bound(start);
    const auto before = after == by_address_.begin() ? by_address_.end() : std::prev(after);
    if (after != by_address_.end() && after->first == start + size) {
      const auto [other, length] = *after;
      size += length;
      erase_hole(other, length);
    }
    if (before != by_address_.end() && before->first + before->second == start) {
      const auto [other, length] = *before;
      start = other;
      size += length;
      erase_hole(other, length);
    }
    insert_hole(start, size);
  }

  // The bytes to report when this buffer is freed, to a profiler that began after buffer number
  // `first`. They are reported if the allocation was reported, or if the buffer is older than the
  // profiler. Buffers allocated since then on threads that the profiler does not follow were never
  // counted.
  std::size_t watched_bytes(void* pointer, std::size_t first) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const Buffer& buffer = used_.at(reinterpret_cast<Address>(pointer));
    return buffer.watched || buffer.serial <= first ? buffer.nbytes : 0;
  }

  // The number of the latest buffer.
  std::size_t serial() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return serial_;
  }

  std::size_t live_bytes() {
    const std::lock_guard<std::mutex> guard(mutex_);
    return live_bytes_;
  }

  // The most bytes in buffers at once since this was called with `anew`.
  std::size_t peak_bytes(bool anew) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (anew) peak_bytes_ = live_bytes_;
    return peak_bytes_;
  }

  // From now on, gives up unused memory whenever more than `nbytes` are resident.
  void limit(std::size_t nbytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    limit_bytes_ = threshold_bytes_ = nbytes;
  }

  // Gives the memory of all empty blocks back to the system.
  void trim() {
    const std::lock_guard<std::mutex> guard(mutex_);
    while (!idle_.empty()) drop(*idle_.begin());
  }

  // Bytes in buffers, in blocks with memory, and moved so far; where the range begins and ends.
  void figures(std::size_t* out) {
    const std::lock_guard<std::mutex> guard(mutex_);
    out[0] = live_bytes_;
    out[1] = resident_bytes();
    out[2] = moved_blocks_ * kBlockBytes;
    out[3] = base_;
    out[4] = stop_;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  bool occupy(Address start, std::size_t size) {
    bool fine = true;
    each_block(start, size, [this](std::size_t index, std::uint32_t part) {
      Block& block = blocks_[index];
      if (block.used_bytes == 0 && block.resident) idle_.erase(index);
      block.used_bytes += part;
      count_whole(block);
    });
    each_block(start, size, [this, &fine](std::size_t index, std::uint32_t) {
      if (!blocks_[index].resident && !fill(index)) fine = false;
    });
    return fine;
  }

  void vacate(Address start, std::size_t size) {
    each_block(start, size, [this](std::size_t index, std::uint32_t part) {
      Block& block = blocks_[index];
      block.used_bytes -= part;
      if (block.used_bytes != 0) return;
      idle_.insert(index);
      if (block.torn) drop(index);  // so that its next memory is a huge page
    });
  }

  template <typename Act>
  void each_block(Address start, std::size_t size, Act act) {
    for (const Address stop = start + size; start < stop;) {
      const std::size_t index = (start - base_) / kBlockBytes;
      const Address next = std::min(stop, address(index + 1));
      act(index, static_cast<std::uint32_t>(next - start));
      start = next;
    }
  }

  // Provides memory for a block that has none: from an empty block, else from the kernel at the
  // first touch. Returns false if the addresses were lost.
  bool fill(std::size_t index) {
    if (!idle_.empty()) {
      const std::size_t idle = *idle_.rbegin();  // best fit gets to the far end last
      if (!may_move(index) || !move_block(pointer(idle), pointer(index))) {
        drop(idle);
        // A move that fails may have unmapped the target first.
        if (!map(pointer(index), kBlockBytes, MAP_FIXED)) return false;
      } else {
        ++moved_blocks_;
        forget(idle);
      }
    }
    blocks_[index].resident = true;
    ++resident_blocks_;
    return true;
  }

  bool may_move(std::size_t index) {
    Block& block = blocks_[index];
    if (!block.mapping && mappings_ == most_mappings_) return false;
    mappings_ += !block.mapping;
    block.mapping = true;
    return true;
  }

  void drop(std::size_t index) {
    madvise(pointer(index), kBlockBytes, MADV_DONTNEED);
    forget(index);
  }

  // If this does not help enough, it is tried again only after resident memory has grown further.
  void give_up() {
    while (!idle_.empty() && resident_bytes() > limit_bytes_) drop(*idle_.begin());
    if (resident_bytes() > limit_bytes_) give_up_holes();
    const std::size_t left = resident_bytes();
    threshold_bytes_ = left <= limit_bytes_ ? limit_bytes_ : left + kPatienceBytes;
  }

  // Gives up the pages of holes in partly used blocks, the largest holes first. What is put there
  // later is faulted in page by page. That is meant for the peaks of a step, which are short.
  void give_up_holes() {
    ++sweeps_;
    for (auto hole = by_size_.rbegin(); hole != by_size_.rend(); ++hole) {
      const auto [size, start] = *hole;
      if (resident_bytes() <= limit_bytes_) return;
      const Address stop = start + size;
      const Address first = std::min(stop, round_up(start + 1, kBlockBytes));
      const Address last = std::max(first, round_down(stop, kBlockBytes));
      if (start < first) give_up_hole(start, first);
      if (last < stop) give_up_hole(last, stop);
    }
  }

  // Gives up the whole pages of a hole that lies in one block.
  void give_up_hole(Address start, Address stop) {
    Block& block = blocks_[(start - base_) / kBlockBytes];
    start = round_up(start, kPageBytes);
    stop = round_down(stop, kPageBytes);
    if (block.used_bytes == 0 || !block.resident || start >= stop) return;
    if (std::exchange(block.sweep, sweeps_) != sweeps_) count_whole(block);
    madvise(reinterpret_cast<void*>(start), stop - start, MADV_DONTNEED);
    block.torn = true;
    block.absent_bytes += stop - start;
    absent_bytes_ += stop - start;
  }

  void count_whole(Block& block) {
    absent_bytes_ -= block.absent_bytes;
    block.absent_bytes = 0;
  }

  void forget(std::size_t index) {
    count_whole(blocks_[index]);
    idle_.erase(index);
    blocks_[index].resident = blocks_[index].torn = false;
    --resident_blocks_;
  }

  void insert_hole(Address start, std::size_t size) {
    by_address_.emplace(start, size);
    by_size_.emplace(size, start);
  }

  void erase_hole(Address start, std::size_t size) {
    by_address_.erase(start);
    by_size_.erase({size, start});
  }

  // Once a block is used again after its holes were given up, all of it counts as resident until
  // they are given up again.
  std::size_t resident_bytes() const { return resident_blocks_ * kBlockBytes - absent_bytes_; }

  Address address(std::size_t index) const { return base_ + index * kBlockBytes; }
  void* pointer(std::size_t index) const { return reinterpret_cast<void*>(address(index)); }

  const Address base_, stop_;
  const std::size_t most_mappings_;
  Block* const blocks_;
  std::set<std::size_t> idle_;  // empty blocks that have memory
  std::map<Address, std::size_t> by_address_;
  std::set<std::pair<std::size_t, Address>> by_size_;
  std::unordered_map<Address, Buffer> used_;
  std::mutex mutex_;
  std::size_t live_bytes_ = 0, peak_bytes_ = 0, resident_blocks_ = 0, moved_blocks_ = 0, mappings_ = 0;
  std::size_t serial_ = 0, absent_bytes_ = 0, limit_bytes_ = SIZE_MAX, threshold_bytes_ = SIZE_MAX;
  std::uint32_t sweeps_ = 0;
};

// The buffers that torch's own allocator serves: the small ones. Autograd alone may hold many, which
// no search of Python's objects finds.
class Outside {
 public:
  void add(const void* pointer, std::size_t nbytes) {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::size_t& known = sizes_[pointer];  // not 0 if it was freed by other means
    live_bytes_ += nbytes - known;
    known = nbytes;
  }

  void remove(const void* pointer) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto entry = sizes_.find(pointer);
    if (entry == sizes_.end()) return;
    live_bytes_ -= entry->second;
    sizes_.erase(entry);
  }

  // The bytes of all buffers but those at the `count` addresses, which differ.
  std::size_t bytes_without(const std::uint64_t* addresses, std::size_t count) {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::size_t nbytes = live_bytes_;
    for (std::size_t i = 0; i < count; ++i) {
      const auto entry = sizes_.find(reinterpret_cast<const void*>(addresses[i]));
      if (entry != sizes_.end()) nbytes -= entry->second;
    }
    return nbytes;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::size_t> sizes_;
  std::size_t live_bytes_ = 0;
};

// Smaller buffers are not counted outside: what autograd notes about an op needs more.
constexpr std::size_t kCountedBytes = 512;

// None of these is ever destroyed: tensors are freed until the very end of the process.
Arena* arena = nullptr;
Outside* outside = nullptr;
c10::Allocator* previous = nullptr;

thread_local char here;  // its address stands for a thread
// The thread with which the latest profiler began, until that profiler ends.
std::atomic<const char*> watcher{nullptr};
std::atomic<std::size_t> first_watched{0};

void begin_watching() {
  first_watched = arena->serial();
  watcher = &here;
}

void end_watching() {
  const char* self = &here;
  if (watcher.load(std::memory_order_relaxed) == self)
    watcher.compare_exchange_strong(self, nullptr);
}

// Whether a profiler follows this thread. outcore's meters tell when they begin and end. Another
// profiler is taken to begin with the first thread that it follows here, and to end when that
// thread next gets here without one.
bool watched() {
  const bool now = c10::memoryProfilingEnabled();
  if (!now)
    end_watching();
  else if (!watcher)
    begin_watching();
  return now;
}

// torch's own reporter does not report that buffers older than the profiler are freed.
void report(void* pointer, std::int64_t change) {
  const c10::Device cpu(c10::DeviceType::CPU);
  c10::reportMemoryUsageToProfiler(pointer, change, arena->live_bytes(), 0, cpu);
}

void release(void* pointer) {
  if (!arena->owns(pointer)) {
    outside->remove(pointer);
    previous->raw_deallocate(pointer);
    return;
  }
  if (watched()) {
    const std::size_t nbytes = arena->watched_bytes(pointer, first_watched);
    if (nbytes) report(pointer, -static_cast<std::int64_t>(nbytes));
  }
  arena->give(pointer);
}

class ArenaAllocator final : public c10::Allocator {
 public:
  ArenaAllocator(std::size_t least_bytes, std::size_t most_bytes)
      : least_bytes_(least_bytes), most_bytes_(most_bytes) {}

  c10::DataPtr allocate(std::size_t nbytes) override {
    const bool ours = least_bytes_ <= nbytes && nbytes <= most_bytes_;
    const bool seen = ours && watched();
    void* pointer = ours ? arena->take(nbytes, seen) : nullptr;
    if (!pointer) {
      pointer = previous->raw_allocate(nbytes);
      if (nbytes >= kCountedBytes) outside->add(pointer, nbytes);
    } else if (seen)
      report(pointer, static_cast<std::int64_t>(nbytes));
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

 private:
  const std::size_t least_bytes_, most_bytes_;
};

// Whether this kernel can move memory and leave both addresses mapped.
bool moves(char* first, char* second) {
  *first = 42;
  const bool moved = move_block(first, second) && *second == 42 && *first == 0;
  madvise(first, kBlockBytes, MADV_DONTNEED);
  madvise(second, kBlockBytes, MADV_DONTNEED);
  return moved;
}

}  // namespace

extern "C" {

// Serves tensors of `least_bytes` to `most_bytes` from now on. Returns null, or the reason why it
// cannot. Call it once.
const char* outcore_arena_install(std::size_t reserve_bytes, std::size_t least_bytes,
                                  std::size_t most_bytes, std::size_t most_mappings) {
  previous = c10::GetCPUAllocator();
  if (previous != c10::GetDefaultCPUAllocator()) return "torch's CPU allocator has been replaced";
  reserve_bytes = round_up(reserve_bytes, kBlockBytes);
  char* range = static_cast<char*>(map(nullptr, reserve_bytes + kBlockBytes, 0));
  if (!range) return "the system does not let this process reserve addresses";
  const Address base = round_up(reinterpret_cast<Address>(range), kBlockBytes);
  char* const first = reinterpret_cast<char*>(base);
  void* blocks = std::calloc(reserve_bytes / kBlockBytes, sizeof(Block));
  if (!blocks || !moves(first, first + kBlockBytes)) {
    std::free(blocks);
    munmap(range, reserve_bytes + kBlockBytes);
    return "the kernel cannot move memory (mremap with MREMAP_DONTUNMAP)";
  }
  arena = new Arena(base, reserve_bytes, static_cast<Block*>(blocks), most_mappings);
  outside = new Outside;
  c10::SetCPUAllocator(new ArenaAllocator(least_bytes, most_bytes));
  if (c10::GetCPUAllocator() == previous) return "torch's CPU allocator cannot be replaced";
  pthread_atfork([] { arena->mutex().lock(); outside->mutex().lock(); },
                 [] { outside->mutex().unlock(); arena->mutex().unlock(); },
                 [] { outside->mutex().unlock(); arena->mutex().unlock(); });
  return nullptr;
}

void outcore_arena_trim() { arena->trim(); }

void outcore_arena_limit(std::size_t nbytes) { arena->limit(nbytes); }

// A profiler begins on this thread, or has ended there.
void outcore_arena_watch(bool begins) { begins ? begin_watching() : end_watching(); }

// The bytes of buffers outside the arena, without those at the `count` addresses.
std::size_t outcore_arena_outside(const std::uint64_t* addresses, std::size_t count) {
  return outside->bytes_without(addresses, count);
}

// The most bytes in buffers at once since this was called with `anew`.
std::size_t outcore_arena_peak(bool anew) { return arena->peak_bytes(anew); }

void outcore_arena_figures(std::size_t* out) { arena->figures(out); }
}
