// A CPU allocator for torch whose resident memory follows the tensors that live.
//
// Buffers lie in one range of reserved addresses, without headers or gaps between them, so that a
// hole fits the size it came from. The range is made of blocks, each one huge page of the kernel's.
// Where a buffer needs a block that has no memory yet, the memory of a block that holds nothing is
// moved there (mremap: no copy, no page fault, no zeroes to write); the kernel is asked for more
// only if there is none. So resident memory is the most that was ever in use at once, to within the
// blocks that are used in part, however the holes lie. This is the virtual-address allocation of
// Sony's out-of-core paper (section 4), with the kernel's page tables in the place of CUDA's.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>

namespace {

using Address = std::uintptr_t;

constexpr std::size_t kBlockBytes = std::size_t{2} << 20;
constexpr std::size_t kAlignmentBytes = 64;  // as torch's own CPU allocator

std::size_t round_up(std::size_t nbytes, std::size_t unit) {
  return (nbytes + unit - 1) / unit * unit;
}

class Arena {
 public:
  // Takes `nbytes` of reserved addresses at `base`, both multiples of the block.
  Arena(Address base, std::size_t nbytes)
      : base_(base),
        stop_(base + nbytes),
        blocks_(static_cast<Block*>(std::calloc(nbytes / kBlockBytes, sizeof(Block))), &std::free) {
    insert_hole(base, nbytes);
  }

  bool owns(const void* pointer) const {
    const auto address = reinterpret_cast<Address>(pointer);
    return base_ <= address && address < stop_;
  }

  // The address of `nbytes`; null where no hole is large enough.
  void* take(std::size_t nbytes) {
    const std::size_t size = round_up(nbytes, kAlignmentBytes);
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto hole = by_size_.lower_bound({size, 0});
    if (hole == by_size_.end()) return nullptr;
    const auto [length, start] = *hole;
    erase_hole(start, length);
    if (length > size) insert_hole(start + size, length - size);
    occupy(start, size);
    used_.emplace(start, size);
    live_bytes_ += size;
    return reinterpret_cast<void*>(start);
  }

  void give(void* pointer) {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto entry = used_.find(reinterpret_cast<Address>(pointer));
    if (entry == used_.end()) std::abort();  // freed twice, or not at its start
    Address start = entry->first;
    std::size_t size = entry->second;
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

  // Gives the memory of all blocks that hold nothing back to the system.
  void trim() {
    const std::lock_guard<std::mutex> guard(mutex_);
    while (!idle_.empty()) drop(*idle_.begin());
  }

  // Bytes of buffers, of blocks with memory, and of memory moved so far.
  void figures(std::size_t* out) {
    const std::lock_guard<std::mutex> guard(mutex_);
    out[0] = live_bytes_;
    out[1] = resident_blocks_ * kBlockBytes;
    out[2] = moved_blocks_ * kBlockBytes;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  struct Block {
    std::uint32_t used_bytes;
    bool resident;
  };

  void occupy(Address start, std::size_t size) {
    each_block(start, size, [this](std::size_t index, std::uint32_t part) {
      Block& block = blocks_[index];
      if (block.used_bytes == 0 && block.resident) idle_.erase(index);
      block.used_bytes += part;
    });
    each_block(start, size, [this](std::size_t index, std::uint32_t) {
      if (!blocks_[index].resident) fill(index);
    });
  }

  void vacate(Address start, std::size_t size) {
    each_block(start, size, [this](std::size_t index, std::uint32_t part) {
      Block& block = blocks_[index];
      block.used_bytes -= part;
      if (block.used_bytes == 0) idle_.insert(index);
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

  // Memory for a block without: that of an idle block, else the kernel's at first touch.
  void fill(std::size_t index) {
    if (!idle_.empty()) {
      const std::size_t idle = *idle_.rbegin();  // best fit comes last to the far end
      if (move(idle, index)) {
        ++moved_blocks_;
        forget(idle);
      } else {  // the process has too many mappings
        drop(idle);
      }
    }
    blocks_[index].resident = true;
    ++resident_blocks_;
  }

  bool move(std::size_t from, std::size_t to) {
    constexpr int kHow = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    return mremap(pointer(from), kBlockBytes, kBlockBytes, kHow, pointer(to)) != MAP_FAILED;
  }

  void drop(std::size_t index) {
    madvise(pointer(index), kBlockBytes, MADV_DONTNEED);
    forget(index);
  }

  void forget(std::size_t index) {
    idle_.erase(index);
    blocks_[index].resident = false;
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

  Address address(std::size_t index) const { return base_ + index * kBlockBytes; }
  void* pointer(std::size_t index) const { return reinterpret_cast<void*>(address(index)); }

  const Address base_, stop_;
  std::unique_ptr<Block[], decltype(&std::free)> blocks_;
  std::set<std::size_t> idle_;  // blocks with memory that hold nothing
  std::map<Address, std::size_t> by_address_;
  std::set<std::pair<std::size_t, Address>> by_size_;
  std::unordered_map<Address, std::size_t> used_;
  std::mutex mutex_;
  std::size_t live_bytes_ = 0, resident_blocks_ = 0, moved_blocks_ = 0;
};

// Neither is ever destroyed: tensors are freed until the very end of the process.
Arena* arena = nullptr;
c10::Allocator* previous = nullptr;

void release(void* pointer) {
  if (!arena->owns(pointer)) {
    previous->raw_deallocate(pointer);
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(pointer);
  arena->give(pointer);
}

class ArenaAllocator final : public c10::Allocator {
 public:
  explicit ArenaAllocator(std::size_t least_bytes) : least_bytes_(least_bytes) {}

  c10::DataPtr allocate(std::size_t nbytes) override {
    void* pointer = nbytes >= least_bytes_ ? arena->take(nbytes) : nullptr;
    if (pointer)
      c10::profiledCPUMemoryReporter().New(pointer, nbytes);
    else
      pointer = previous->raw_allocate(nbytes);
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* target, const void* source, std::size_t nbytes) const override {
    default_copy_data(target, source, nbytes);
  }

 private:
  const std::size_t least_bytes_;
};

}  // namespace

extern "C" {

// Serves tensors of `least_bytes` and more from now on. Returns null, else why it cannot.
const char* outcore_arena_install(std::size_t reserve_bytes, std::size_t least_bytes) {
  if (arena) return nullptr;
  previous = c10::GetCPUAllocator();
  if (!previous->raw_deleter()) return "torch's CPU allocator has been replaced";
  reserve_bytes = round_up(reserve_bytes, kBlockBytes);
  constexpr int kKind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* range = mmap(nullptr, reserve_bytes + kBlockBytes, PROT_READ | PROT_WRITE, kKind, -1, 0);
  if (range == MAP_FAILED) return "the system does not let this process reserve addresses";
  const Address base = round_up(reinterpret_cast<Address>(range), kBlockBytes);
  madvise(reinterpret_cast<void*>(base), reserve_bytes, MADV_HUGEPAGE);
  arena = new Arena(base, reserve_bytes);
  pthread_atfork([] { arena->mutex().lock(); }, [] { arena->mutex().unlock(); },
                 [] { arena->mutex().unlock(); });
  c10::SetCPUAllocator(new ArenaAllocator(least_bytes));
  return nullptr;
}

void outcore_arena_trim() { arena->trim(); }

void outcore_arena_figures(std::size_t* out) { arena->figures(out); }
}
