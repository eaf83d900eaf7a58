// Missing waits: work of two streams that touches the same memory, some of it writing, with nothing that
// orders one before the other. They are found by the waits between pieces of work, and not by the order of a
// run: with vector clocks (Fidge 1988, Mattern 1989), as in torch's CUDA sanitizer. All kernels and copies
// count, also those of NCCL.
//
//     a launch          its stream also knows all that the host knows
//     event record      stores the present knowledge of the stream
//     event wait        the stream also knows all that the record stored
//     host waits, or sees that an event is done     the host knows that, too
//
// Knowledge is, for each stream, the number up to which its work is done. All threads of the host share
// theirs.
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

// Writes a line of JSON for the lab into HOLMES_GPU_WATCH/rank<N>.races, with the Python stack of this
// thread.
void tell_race(const std::string& members);
// JSON members that identify the work.
std::string described(const Work& work);

}  // namespace gpu
