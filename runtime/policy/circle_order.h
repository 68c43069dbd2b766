// Uses that are open on a circle of positions, in the order in which their next uses come; the farthest in a few steps.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace misa::policy {

// Ranks 0 … n-1 that are in or out; the highest one below a bound is found by words of 64, then words of words.
class RankSet {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  explicit RankSet(size_t ranks) {
    do {
      ranks = (ranks + 63) / 64;
      levels_.emplace_back(ranks, 0);
    } while (ranks > 1);
  }

  void Insert(uint32_t rank) {
    for (std::vector<uint64_t>& level : levels_) {
      level[rank / 64] |= uint64_t{1} << rank % 64;
      rank /= 64;
    }
  }
  void Erase(uint32_t rank) {
    for (std::vector<uint64_t>& level : levels_) {
      level[rank / 64] &= ~(uint64_t{1} << rank % 64);
      if (level[rank / 64] != 0) {
        return;
      }
      rank /= 64;
    }
  }
  // The highest rank under `bound`, or kNone.
  uint32_t HighestBelow(uint32_t bound) const {
    for (size_t level = 0; level < levels_.size(); ++level) {
      const uint32_t word = bound / 64;
      const uint64_t below = bound % 64 == 0 ? 0 : levels_[level][word] & ((uint64_t{1} << bound % 64) - 1);
      if (below != 0) {
        uint32_t found = word * 64 + 63 - static_cast<uint32_t>(std::countl_zero(below));
        while (level-- > 0) {
          found = found * 64 + 63 - static_cast<uint32_t>(std::countl_zero(levels_[level][found]));
        }
        return found;
      }
      bound = word;
    }
    return kNone;
  }

 private:
  std::vector<std::vector<uint64_t>> levels_;
};

// Items with an end on a circle of `count` positions each. Seen from a position, ends after it come first and those at
// or before it belong to the next time around.
class CircleOrder {
 public:
  // `ends[i]` is item i's end, under `count`.
  CircleOrder(const std::vector<uint32_t>& ends, size_t count)
      : rank_(ends.size()), item_(ends.size()), first_(count + 1, 0), open_(ends.size() + 1) {
    for (const uint32_t end : ends) {
      ++first_[end + 1];
    }
    for (size_t p = 0; p < count; ++p) {
      first_[p + 1] += first_[p];
    }
    std::vector<uint32_t> next(first_.begin(), first_.end() - 1);
    for (uint32_t i = 0; i < ends.size(); ++i) {
      rank_[i] = next[ends[i]]++;
      item_[rank_[i]] = i;
    }
  }

  void Insert(uint32_t item) { open_.Insert(rank_[item]); }
  void Erase(uint32_t item) { open_.Erase(rank_[item]); }

  // The open item whose end comes last from `position` on; kNone where none is open.
  uint32_t Farthest(size_t position) const { return Before(first_[position + 1], position, false); }
  // The one whose end comes next before `item`'s, seen from there.
  uint32_t Nearer(uint32_t item, size_t position) const {
    const uint32_t bound = first_[position + 1];
    return Before(rank_[item], position, rank_[item] >= bound);
  }

  static constexpr uint32_t kNone = RankSet::kNone;

 private:
  // The highest open rank under `rank`; past the circle's start it goes on from its end, down to the position's.
  uint32_t Before(uint32_t rank, size_t position, bool wrapped) const {
    const uint32_t bound = first_[position + 1];
    uint32_t found = open_.HighestBelow(rank);
    if (!wrapped && found == kNone) {
      wrapped = true;
      found = open_.HighestBelow(static_cast<uint32_t>(item_.size()));
    }
    return found == kNone || (wrapped && found < bound) ? kNone : item_[found];
  }

  std::vector<uint32_t> rank_;
  std::vector<uint32_t> item_;   // by rank
  std::vector<uint32_t> first_;  // rank of a position's first end; one more at the end
  RankSet open_;
};

// Lists of items by position, one after the other in one array.
class PositionLists {
 public:
  // Item i belongs to `positions[i]`, or to none where that is kNone.
  PositionLists(const std::vector<uint32_t>& positions, size_t count) : first_(count + 1, 0) {
    for (const uint32_t position : positions) {
      if (position != kNone) {
        ++first_[position + 1];
      }
    }
    for (size_t p = 0; p < count; ++p) {
      first_[p + 1] += first_[p];
    }
    items_.resize(first_[count]);
    std::vector<uint32_t> next(first_.begin(), first_.end() - 1);
    for (uint32_t i = 0; i < positions.size(); ++i) {
      if (positions[i] != kNone) {
        items_[next[positions[i]]++] = i;
      }
    }
  }

  const uint32_t* begin(size_t position) const { return items_.data() + first_[position]; }
  const uint32_t* end(size_t position) const { return items_.data() + first_[position + 1]; }

  static constexpr uint32_t kNone = UINT32_MAX;

 private:
  std::vector<uint32_t> first_;
  std::vector<uint32_t> items_;
};

}  // namespace misa::policy
