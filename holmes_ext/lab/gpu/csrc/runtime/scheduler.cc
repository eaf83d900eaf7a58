#include "scheduler.h"

#include <signal.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "emulated_gpu.h"
#include "text.h"
#include "watch.h"

namespace gpu {

namespace {

// A kernel that ends this little before its time ends now: the next one begins where it should have ended, so that
// the error does not add up, and a stream of small kernels does not sleep after each. Seconds.
constexpr double kSlack = 100e-6;
constexpr int kShownWork = 64;  // of a stream, in a report
constexpr auto kLatest = std::chrono::milliseconds(50);
constexpr size_t kRecent = 256;  // labelled kernels, done ones too

thread_local Work* running = nullptr;
thread_local HostWait* outside = nullptr;  // what this host thread waits for outside CUDA

void sleep_until(double when) {
  timespec moment;
  moment.tv_sec = static_cast<time_t>(when);
  moment.tv_nsec = static_cast<long>((when - static_cast<double>(moment.tv_sec)) * 1e9);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, nullptr) != 0) {
  }
}

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kKernel: return "kernel";
    case Kind::kCopy: return "copy";
    case Kind::kHostFunction: return "host function";
    case Kind::kRecord: return "event record";
    case Kind::kWait: return "event wait";
  }
  return "";
}

}  // namespace

double now() {
  timespec moment;
  clock_gettime(CLOCK_MONOTONIC, &moment);
  return static_cast<double>(moment.tv_sec) + static_cast<double>(moment.tv_nsec) * 1e-9;
}

bool Ticket::open() const { return stream && (begun ? stream->started : stream->completed) < sequence; }

struct Scheduler::Worker {
  std::condition_variable wake;
  WorkPointer work;
};

struct Scheduler::Device {
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

Scheduler& Scheduler::instance() {
  static Scheduler* scheduler = new Scheduler;  // never destroyed: workers may run while the process ends
  static std::once_flag watched;
  std::call_once(watched, start_watch);
  return *scheduler;
}

Scheduler::Scheduler()
    : flops_(static_cast<double>(egpuSetting("MFLOPS", 0)) * 1e6),
      bytes_(static_cast<double>(egpuSetting("MBYTES", 0)) * 1e6),
      random_(egpuSetting("RANDOM", 0) != 0),
      random_state_(static_cast<uint64_t>(egpuSetting("SEED", 0)) * 7919 + 104729 * (1 + rank_of_process())) {}

Scheduler::Device& Scheduler::device(int number) {
  auto& found = devices_[number];
  if (!found) {
    const char* text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    int connections = text ? atoi(text) : 8;  // CUDA's default; it takes 1 to 32
    found = std::make_unique<Device>(std::min(std::max(connections, 1), 32), static_cast<int>(egpuSetting("SMS", 108)));
  }
  return *found;
}

StreamPointer Scheduler::make_stream(int number, unsigned flags, int priority, bool legacy) {
  std::lock_guard<std::mutex> lock(mutex_);
  Device& where = device(number);
  auto stream = std::make_shared<Stream>();
  stream->device = number;
  stream->flags = flags;
  stream->priority = priority;
  stream->id = static_cast<unsigned long long>(number) * 100000 + where.made + 1;
  ++where.made;
  stream->legacy = legacy;
  stream->blocking = !legacy && !(flags & cudaStreamNonBlocking);
  where.streams.push_back(stream);
  if (legacy) where.legacy = stream;
  return stream;
}

void Scheduler::destroy_stream(const StreamPointer& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  stream->destroyed = true;  // what is in it still runs, as CUDA says
  auto& streams = device(stream->device).streams;
  streams.erase(std::remove_if(streams.begin(), streams.end(), [](auto& one) { return one.expired(); }), streams.end());
}

// The default stream waits for what is in the blocking streams, and they for what is in it (CUDA Programming Guide,
// "Legacy default stream").
void Scheduler::order_with_legacy(Work& work, Device& where) {
  if (work.stream->legacy) {
    for (auto& other : where.streams) {
      StreamPointer stream = other.lock();
      if (stream && stream->blocking && stream->submitted > stream->completed) {
        work.after.push_back({stream, stream->submitted});
      }
    }
  } else if (work.stream->blocking && where.legacy && where.legacy->submitted > where.legacy->completed) {
    work.after.push_back({where.legacy, where.legacy->submitted});
  }
}

int Scheduler::free_connection(const Device& where) {
  std::vector<int> streams(where.connections.size());
  for (auto& stream : active_) {
    if (&device(stream->device) == &where) ++streams[stream->connection];
  }
  return static_cast<int>(std::min_element(streams.begin(), streams.end()) - streams.begin());
}

Ticket Scheduler::submit(const StreamPointer& stream, WorkPointer work) {
  std::lock_guard<std::mutex> lock(mutex_);
  Device& where = device(stream->device);
  work->stream = stream;
  work->submitted = now();
  order_with_legacy(*work, where);
  if (stream->queue.empty()) stream->connection = free_connection(where);
  work->sequence = ++stream->submitted;
  work->position = ++where.connections[stream->connection].submitted;
  Ticket ticket{stream, work->sequence};
  ++submitted_;
  if (random_) moved_.notify_all();
  if (!work->label.empty()) {
    if (recent_.size() == kRecent) recent_.pop_front();
    recent_.push_back(work->label);
  }
  if (work->kind == Kind::kRecord) work->record->ticket = ticket;
  if (stream->queue.empty()) active_.push_back(stream);
  stream->queue.push_back(std::move(work));
  if (stream->queue.size() == 1) advance();
  return ticket;
}

Ticket Scheduler::last(const StreamPointer& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return {stream, stream->submitted};
}

std::vector<Ticket> Scheduler::last_of_device(int number) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Ticket> tickets;
  for (auto& stream : active_) {
    if (stream->device == number) tickets.push_back({stream, stream->submitted});
  }
  return tickets;
}

bool Scheduler::done(const Ticket& ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  return !ticket.open();
}

void Scheduler::wait(const char* call, std::vector<Ticket> tickets) {
  std::unique_lock<std::mutex> lock(mutex_);
  HostWait wait;
  wait.call = call;
  wait.tickets = std::move(tickets);
  auto open = [](const Ticket& ticket) { return ticket.open(); };
  auto over = [&] { return std::none_of(wait.tickets.begin(), wait.tickets.end(), open); };
  if (over()) return;
  host_waits_.push_back(&wait);
  if (random_) moved_.notify_all();
  wait.done.wait(lock, over);
  host_waits_.erase(std::find(host_waits_.begin(), host_waits_.end(), &wait));
}

void Scheduler::host_waits(const char* call, const char* target) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (outside) {
    host_waits_.erase(std::find(host_waits_.begin(), host_waits_.end(), outside));
    delete outside;
    outside = nullptr;
  }
  if (!call) return;
  outside = new HostWait;
  outside->call = call;
  outside->target = target;
  host_waits_.push_back(outside);
}

std::string Scheduler::obstacle(const Work& work, Device& where) {
  for (const Ticket& ticket : work.after) {
    if (ticket.open()) {
      return text("\"after\": {\"device\": %d, \"stream\": %llu, \"sequence\": %llu}", ticket.stream->device,
                  ticket.stream->id, static_cast<unsigned long long>(ticket.sequence));
    }
  }
  if (where.connections[work.stream->connection].started + 1 < work.position) {
    return text("\"queue\": %d", work.stream->connection);
  }
  int wanted = work.sms ? std::min(work.sms, where.all_sms) : work.kind == Kind::kKernel ? 1 : 0;
  if (wanted > where.free_sms) return text("\"sms\": %d, \"free\": %d", wanted, where.free_sms);
  return "";
}

bool Scheduler::may_start(const Work& work, Device& where) { return obstacle(work, where).empty(); }

void Scheduler::start(Work& work, Device& where) {
  work.started = true;
  if (work.run) ++executing_;
  work.stream->started = work.sequence;
  ++where.connections[work.stream->connection].started;
  where.free_sms -= std::min(work.sms, where.all_sms);
  double begin = std::max(work.stream->clock, work.submitted);
  if (work.kind == Kind::kWait) begin = std::max(begin, work.record->when);
  double seconds = std::max(flops_ ? work.flops / flops_ : 0, bytes_ ? work.bytes / bytes_ : 0);
  if (seconds > 0) {
    seconds *= static_cast<double>(where.all_sms) / std::max(where.free_sms, 1);
    begin = std::max(begin, where.compute_clock);
    work.end = where.compute_clock = begin + seconds;
  } else if (!work.run) {
    work.end = begin;
  }
  progress();
  wake_hosts(*work.stream);
}

void Scheduler::wake_hosts(const Stream& stream) {
  for (HostWait* wait : host_waits_) {
    for (const Ticket& ticket : wait->tickets) {
      if (ticket.stream.get() == &stream && !ticket.open()) wait->done.notify_one();
    }
  }
}

void Scheduler::finish(Work& work, Device& where) {
  Stream& stream = *work.stream;
  where.free_sms += std::min(work.sms, where.all_sms);
  stream.clock = work.end ? work.end : now();
  if (work.kind == Kind::kRecord) work.record->when = stream.clock;
  stream.completed = work.sequence;
  stream.queue.pop_front();
  if (stream.queue.empty()) {
    auto place = std::find_if(active_.begin(), active_.end(), [&](auto& one) { return one.get() == &stream; });
    active_.erase(place);
  }
  progress();
  wake_hosts(stream);
}

void Scheduler::advance(WorkPointer* for_caller) {
  for (bool again = true; again;) {
    again = false;
    for (size_t index = 0; index < active_.size(); ++index) {
      StreamPointer stream = active_[index];
      WorkPointer work = stream->queue.front();
      Device& where = *devices_[stream->device];
      if (work->started || !may_start(*work, where)) continue;
      start(*work, where);
      again = true;
      if (!work->run) {
        finish(*work, where);
        break;  // active_ may have changed
      }
      if (for_caller && !*for_caller) {
        *for_caller = std::move(work);
      } else {
        hand_over(std::move(work));
      }
    }
  }
}

void Scheduler::hand_over(WorkPointer work) {
  if (!idle_.empty()) {
    Worker* worker = idle_.back();  // the one that ran last: its caches are warm
    idle_.pop_back();
    worker->work = std::move(work);
    worker->wake.notify_one();
    return;
  }
  auto* worker = new Worker;
  worker->work = std::move(work);
  sigset_t all, before;  // signals are for the threads of the program
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(&Scheduler::worker_main, this, worker).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Scheduler::worker_main(Worker* self) {
  pthread_setname_np(pthread_self(), "emulated-gpu");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    self->wake.wait(lock, [&] { return self->work != nullptr; });
    WorkPointer work = std::move(self->work);
    while (work) {
      bool skip = failures_.count(work->stream->device) != 0;  // after an error a device runs nothing any more
      if (random_ && work->kind != Kind::kHostFunction) start_late(lock);
      lock.unlock();
      if (!skip) run(*work);
      if (work->end > now() + kSlack) sleep_until(work->end);
      work->run = nullptr;  // what it holds is released here, not under the lock
      lock.lock();
      --executing_;
      if (random_) moved_.notify_all();
      finish(*work, *devices_[work->stream->device]);
      work = nullptr;
      advance(&work);
    }
    idle_.push_back(self);
  }
}

void Scheduler::run(Work& work) {
  running = &work;
  work.run();
  running = nullptr;
}

// --gpu-order random: a third of the work starts late, when the host has submitted up to 64 more pieces of work; at the
// latest when the host waits and nothing else runs, or after 50 ms. (Counted, as hosts are slow on a busy machine.)
void Scheduler::start_late(std::unique_lock<std::mutex>& lock) {
  random_state_ = random_state_ * 6364136223846793005ull + 1442695040888963407ull;
  uint64_t drawn = random_state_ >> 33;
  if (drawn % 3) return;
  uint64_t until = submitted_ + 1 + drawn / 3 % 64;
  --executing_;
  moved_.notify_all();
  moved_.wait_for(lock, kLatest, [&] { return submitted_ >= until || (!host_waits_.empty() && executing_ == 0); });
  ++executing_;
}

void Scheduler::set_waits_for(Work& work, const char* json_members) {
  std::lock_guard<std::mutex> lock(mutex_);
  work.waits_for = json_members;
}

void Scheduler::fail(int number, const std::string& message) {
  std::lock_guard<std::mutex> lock(mutex_);
  failures_.emplace(number, message);
  any_failure_.store(true, std::memory_order_release);
}

std::string Scheduler::failure(int number) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = failures_.find(number);
  return found == failures_.end() ? "" : found->second;
}

std::string Scheduler::state_json() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string streams, hosts;
  for (auto& stream : active_) {
    std::string works;
    for (auto& work : stream->queue) {
      if (works.size() && stream->queue.size() > kShownWork && work->sequence > stream->completed + kShownWork) break;
      std::string state = work->started ? work->waits_for : work == stream->queue.front() ? obstacle(*work, *devices_[stream->device]) : "";
      works += text("%s{\"kind\": \"%s\", \"name\": \"%s\", \"sequence\": %llu, \"position\": %llu, \"started\": %s, \"sms\": %d%s%s, \"waits_for\": {%s}}",
                    works.empty() ? "" : ", ", kind_name(work->kind), escaped(work->name).c_str(),
                    static_cast<unsigned long long>(work->sequence), static_cast<unsigned long long>(work->position),
                    work->started ? "true" : "false", work->sms, work->label.empty() ? "" : ", ", work->label.c_str(), state.c_str());
    }
    streams += text("%s{\"device\": %d, \"stream\": %llu, \"queue\": %d, \"work\": [%s]}", streams.empty() ? "" : ", ",
                    stream->device, stream->id, stream->connection, works.c_str());
  }
  for (HostWait* wait : host_waits_) {
    std::string tickets;
    for (const Ticket& ticket : wait->tickets) {
      if (!ticket.open()) continue;
      tickets += text("%s{\"device\": %d, \"stream\": %llu, \"sequence\": %llu}", tickets.empty() ? "" : ", ",
                      ticket.stream->device, ticket.stream->id, static_cast<unsigned long long>(ticket.sequence));
    }
    hosts += text("%s{\"call\": \"%s\", \"for\": [%s]%s%s}", hosts.empty() ? "" : ", ", wait->call.c_str(),
                  tickets.c_str(), wait->target.empty() ? "" : ", ", wait->target.c_str());
  }
  std::string recent;
  for (const std::string& label : recent_) recent += (recent.empty() ? "{" : ", {") + label + "}";
  const char* node = getenv("HOLMES_LAB_NODE");
  return text("{\"progress\": %llu, \"node\": \"%s\", \"streams\": [%s], \"hosts\": [%s], \"recent\": [%s]}",
              static_cast<unsigned long long>(progress_count()), node ? node : "", streams.c_str(), hosts.c_str(),
              recent.c_str());
}

}  // namespace gpu

extern "C" {

egpuRunning egpuThisKernel(void) { return reinterpret_cast<egpuRunning>(gpu::running); }

void egpuWaitsFor(egpuRunning kernel, const char* json_members) {
  gpu::Scheduler::instance().set_waits_for(*reinterpret_cast<gpu::Work*>(kernel), json_members);
}

void egpuHostWaits(const char* call, const char* target) { gpu::Scheduler::instance().host_waits(call, target); }

void egpuProgress(void) { gpu::Scheduler::instance().progress(); }

void egpuFail(egpuRunning kernel, const char* message) {
  gpu::Work& work = *reinterpret_cast<gpu::Work*>(kernel);
  gpu::Scheduler::instance().fail(work.stream->device, work.name + ": " + message);
}
}
