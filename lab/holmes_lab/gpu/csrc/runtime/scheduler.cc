#include "scheduler.h"

#include <time.h>

#include <algorithm>

#include "emulated_gpu.h"
#include "races.h"
#include "text.h"
#include "watch.h"

namespace gpu {

namespace {

constexpr size_t kRecent = 256;  // labelled kernels, done ones too

// Of a host thread. Queries of other threads (NCCL's watchdog checks whether events are done) order no
// launch.
thread_local bool launches = false;

}  // namespace

double now() {
  timespec moment;
  clock_gettime(CLOCK_MONOTONIC, &moment);
  return static_cast<double>(moment.tv_sec) + static_cast<double>(moment.tv_nsec) * 1e-9;
}

BriefMutex::BriefMutex() {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP);
  pthread_mutex_destroy(native_handle());
  pthread_mutex_init(native_handle(), &attributes);
}

bool Ticket::open() const { return stream && (begun ? stream->started : stream->completed) < sequence; }

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
      random_state_(static_cast<uint64_t>(egpuSetting("SEED", 0)) * 7919 + 104729 * (1 + rank_of_process())),
      races_(random_ ? new Races : nullptr) {}

Scheduler::Device& Scheduler::device(int number) {
  auto& found = devices_[number];
  if (!found) {
    const char* text = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    int connections = text ? atoi(text) : 8;  // CUDA's default; it takes 1 to 32
    found = std::make_unique<Device>(std::min(std::max(connections, 1), 32),
                                     static_cast<int>(egpuSetting("SMS", 108)));
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
  stream->destroyed = true;  // its work still runs, as CUDA's documentation says
  auto& streams = device(stream->device).streams;
  streams.erase(std::remove_if(streams.begin(), streams.end(), [](auto& one) { return one.expired(); }),
                streams.end());
}

// The default stream waits for the work in the blocking streams, and they for the work in it (CUDA
// Programming Guide, "Legacy default stream").
void Scheduler::order_with_legacy(Work& work, Device& where) {
  if (work.stream->legacy) {
    for (auto& other : where.streams) {
      StreamPointer stream = other.lock();
      if (stream && stream->blocking && (races_ || stream->submitted > stream->completed)) {
        work.after.push_back({stream, stream->submitted});
      }
    }
  } else if (work.stream->blocking && where.legacy &&
             (races_ || where.legacy->submitted > where.legacy->completed)) {
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
  if (work->kind != Kind::kRecord && work->kind != Kind::kWait) {
    work->position = ++where.connections[stream->connection].submitted;
  }
  Ticket ticket{stream, work->sequence};
  ++submitted_;
  if (random_) moved_.notify_all();
  if (!work->label.empty()) {
    if (recent_.size() == kRecent) recent_.pop_front();
    recent_.push_back(work->label);
  }
  if (work->kind == Kind::kRecord) work->record->ticket = ticket;
  launches = true;
  if (races_) races_->launch(*work);
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
  for (auto& one : device(number).streams) {
    StreamPointer stream = one.lock();
    if (stream && (races_ || stream->submitted > stream->completed))
      tickets.push_back({stream, stream->submitted});
  }
  return tickets;
}

bool Scheduler::done(const Ticket& ticket) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (ticket.open()) return false;
  if (races_ && launches) races_->host_knows(ticket);
  return true;
}

bool Scheduler::known_to_host(const void* begin, size_t size) {
  std::lock_guard<std::mutex> lock(mutex_);
  return races_->known_to_host(static_cast<const char*>(begin), size);
}

void Scheduler::wait(const char* call, std::vector<Ticket> tickets) {
  std::unique_lock<std::mutex> lock(mutex_);
  HostWait wait;
  wait.call = call;
  wait.tickets = std::move(tickets);
  auto open = [](const Ticket& ticket) { return ticket.open(); };
  auto over = [&] { return std::none_of(wait.tickets.begin(), wait.tickets.end(), open); };
  if (!over()) {
    host_waits_.push_back(&wait);
    if (random_) moved_.notify_all();
    wait.done.wait(lock, over);
    host_waits_.erase(std::find(host_waits_.begin(), host_waits_.end(), &wait));
  }
  for (const Ticket& ticket : wait.tickets) {
    if (races_) races_->host_knows(ticket);
  }
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
  if (work.position) ++where.connections[work.stream->connection].started;
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
    auto place =
        std::find_if(active_.begin(), active_.end(), [&](auto& one) { return one.get() == &stream; });
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

}  // namespace gpu
