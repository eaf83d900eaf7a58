// Missing waits: work of two streams that touches the same memory, some of it writing, with nothing that puts
// one before the other. Found by what waits for what, and not by what came first: vector clocks (Fidge 1988,
// Mattern 1989), as in torch's CUDA sanitizer; of all kernels and copies, those of NCCL among them.
//
//     a launch          its stream knows what the host knows
//     event record      keeps what the stream knows now
//     event wait        the stream knows what the record kept
//     host waits, or sees that an event is done     the host knows that, too
//
// Known is, of each stream, up to which number its work is done. Threads of the host count as one.
#pragma once

#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "scheduler.h"

namespace gpu {

// Only under the scheduler's lock.
class Races {
 public:
  void launch(const Work& work);             // in the order of launches, its sequence known
  void host_knows(const Ticket& ticket);     // which is done
  bool known_to_host(const char* begin, size_t size);  // all that writes there

 private:
  using Clock = std::vector<uint64_t>;  // by streams, in the order of their first work
  struct Order {
    Clock clock;
    std::deque<std::pair<uint64_t, Clock>> kept;  // after the work of that number
  };
  struct Whose {
    std::string what, members;  // the same for each launch of a kernel in a stream; JSON, of this one
  };
  struct Use {
    size_t stream;
    uint64_t sequence;
    std::shared_ptr<const Whose> whose;
  };
  struct Piece {
    const char* end;
    std::vector<Use> writes, reads;  // one write at most; one read for each stream
  };
  using Pieces = std::map<const char*, Piece>;

  size_t number_of(const Stream& stream);
  Clock clock_at(size_t stream, uint64_t sequence) const;
  Pieces::iterator split(const char* at);
  void touch(const Access& access, const Use& use, const Clock& clock);
  void check(const std::vector<Use>& before, bool wrote, const Use& use, const Clock& clock,
             const Access& access);

  std::unordered_map<unsigned long long, size_t> numbers_;  // of streams, by their id
  std::vector<Order> orders_;
  Clock host_;
  Pieces memory_;
  std::set<std::string> told_;
};

// Tells the lab: a line of JSON in HOLMES_GPU_WATCH/rank<N>.races, with the Python stack of this thread.
void tell_race(const std::string& members);
// JSON members that say which work it is.
std::string described(const Work& work);

}  // namespace gpu
