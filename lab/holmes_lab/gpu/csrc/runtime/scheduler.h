// Scheduler of an emulated GPU: the order of work by streams, events, hardware queues and multiprocessors.
//
//     stream 7   [kernel][record e][kernel]            each stream's work in order; its head starts when
//     stream 9   [wait e][kernel]                        - what it waits for is done (events, legacy stream)
//                                                        - all before it in its hardware queue has started
//     hardware queue 0: streams 7, 12 ...                - as many multiprocessors are free as it holds
//
// CUDA_DEVICE_MAX_CONNECTIONS is the number of hardware queues. A stream that gets work takes the queue with
// the fewest streams, and keeps it until it is empty (CUDA does not document its choice: so none is shared
// without need). Work behind a head that cannot start yet waits with it, whichever stream it belongs to.
// Records and waits have no place in a queue, only what comes behind them in their stream: NCCL puts both
// behind each kernel (ncclLaunchFinish, src/enqueue.cc), and under one queue Megatron-LM's products still
// overlap a gather that was launched before them (core/tensor_parallel/layers.py relies on it).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace gpu {

double now();  // seconds, monotonic

struct Stream;
using StreamPointer = std::shared_ptr<Stream>;

// All that was put into `stream` up to its work number `sequence`: done, or (begun) started.
struct Ticket {
  StreamPointer stream;
  uint64_t sequence = 0;
  bool begun = false;
  bool open() const;  // not yet
};

// Last record of an event. when: seconds, once it is done.
struct Record {
  Ticket ticket;
  double when = 0;
};
using RecordPointer = std::shared_ptr<Record>;

enum class Kind { kKernel, kCopy, kHostFunction, kRecord, kWait };
const char* kind_name(Kind kind);

// Memory that work reads or writes.
struct Access {
  const void* begin;
  size_t size;
  bool writes;
};

struct Work {
  Kind kind = Kind::kKernel;
  std::string name;
  std::string label;            // JSON members that describe it further
  std::function<void()> run;    // empty for kRecord and kWait
  double flops = 0, bytes = 0;  // of a kernel
  int sms = 0;                  // held while it runs
  std::vector<Ticket> after;    // other streams' work that must be done
  RecordPointer record;         // kRecord: the record to stamp; kWait: the record to wait for
  std::vector<Access> accesses;  // as far as they are known, where missing waits are searched for
  // Kept by the scheduler.
  StreamPointer stream;
  uint64_t sequence = 0, position = 0;  // in its stream, in its hardware queue (0: none)
  double submitted = 0, end = 0;  // seconds; end: when the emulated clock lets it end (0: when it has run)
  bool started = false;
  std::string waits_for;  // JSON members, set by the running kernel
};
using WorkPointer = std::shared_ptr<Work>;

struct Stream {
  int device = 0;
  unsigned flags = 0;
  int priority = 0;
  unsigned long long id = 0;
  int connection = 0;   // its hardware queue, while it has work
  bool legacy = false;  // the default stream: it and the blocking streams wait for each other
  bool blocking = false;
  bool destroyed = false;
  std::deque<WorkPointer> queue;                       // its head may be running
  uint64_t submitted = 0, started = 0, completed = 0;  // sequence numbers
  double clock = 0;                                    // when its last work ended, seconds
};

// Wait of a host thread: for all of these, in the CUDA call of that name, or (target) for another rank.
struct HostWait {
  std::string call, target;
  std::vector<Ticket> tickets;
  std::condition_variable done;
};

// A thread that finds it locked tries again before it sleeps, since it is held for less time than a sleep
// takes.
struct BriefMutex : std::mutex {
  BriefMutex();
};

class Races;

class Scheduler {
 public:
  static Scheduler& instance();  // made at first use, in the process that uses it (after a fork)

  StreamPointer make_stream(int device, unsigned flags, int priority, bool legacy = false);
  void destroy_stream(const StreamPointer& stream);

  // Puts work into a stream; returns its ticket.
  Ticket submit(const StreamPointer& stream, WorkPointer work);
  Ticket last(const StreamPointer& stream);  // a ticket for all that is in it now
  std::vector<Ticket> last_of_device(int device);
  bool done(const Ticket& ticket);
  bool searches_races() const { return races_ != nullptr; }
  bool known_to_host(const void* begin, size_t size);  // all that writes there, where races are searched for
  void wait(const char* call, std::vector<Ticket> tickets);

  // See emulated_gpu.h.
  void host_waits(const char* call, const char* target);
  void set_waits_for(Work& work, const char* json_members);
  void progress() { progress_.fetch_add(1, std::memory_order_relaxed); }
  uint64_t progress_count() { return progress_.load(std::memory_order_relaxed); }
  void fail(int device, const std::string& message);
  std::string failure(int device);  // message of the kernel that failed on the device; "" if none did
  bool any_failure() { return any_failure_.load(std::memory_order_acquire); }

  std::string state_json();  // state of every stream and every waiting host thread of this process

 private:
  struct Worker {
    std::condition_variable wake;
    WorkPointer work;
    std::atomic<bool> has_work{false};
    bool asleep = false;
  };
  struct Device {
    struct Connection {
      uint64_t submitted = 0, started = 0;
    };
    explicit Device(int connections, int sms) : connections(connections), free_sms(sms), all_sms(sms) {}
    std::vector<Connection> connections;
    std::vector<std::weak_ptr<Stream>> streams;
    StreamPointer legacy;
    int made = 0;  // streams
    int free_sms, all_sms;
    double compute_clock = 0;  // until when its multiprocessors compute, seconds
  };
  Scheduler();
  Device& device(int number);
  int free_connection(const Device& device);
  void order_with_legacy(Work& work, Device& device);
  std::string obstacle(const Work& work, Device& device);  // JSON members; "" when it may start
  bool may_start(const Work& work, Device& device);
  void start(Work& work, Device& device);
  void finish(Work& work, Device& device);
  void wake_hosts(const Stream& stream);
  void advance(
      WorkPointer* for_caller = nullptr);  // starts all that may; one of them is left to the calling worker
  void hand_over(WorkPointer work);
  void worker_main(Worker* self);
  void look_for_work(Worker* self, std::unique_lock<std::mutex>& lock);
  void run(Work& work);
  void start_late(std::unique_lock<std::mutex>& lock);

  BriefMutex mutex_;
  std::map<int, std::unique_ptr<Device>> devices_;
  std::vector<StreamPointer> active_;  // those with work
  std::vector<Worker*> idle_;
  std::vector<HostWait*> host_waits_;
  std::deque<std::string> recent_;  // labels of the last kernels that have one
  std::map<int, std::string> failures_;
  std::atomic<bool> any_failure_{false};
  std::atomic<uint64_t> progress_{0};
  const double flops_,
      bytes_;          // of the emulated GPU in a second; 0: kernels take the time that the host takes
  const bool random_;  // whether work starts late, at random
  uint64_t random_state_;
  uint64_t submitted_ = 0;  // pieces of work, to all streams
  int executing_ = 0;       // work that runs and is not held back
  std::condition_variable moved_;
  std::unique_ptr<Races> races_;  // with --gpu-order random
};

}  // namespace gpu
