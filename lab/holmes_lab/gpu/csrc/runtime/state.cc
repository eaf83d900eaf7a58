// State of a process as JSON: its pending work, the waits between pieces of work, and errors. The lab
// requests it when a job hangs (watch.cc).

#include <algorithm>

#include "emulated_gpu.h"
#include "scheduler.h"
#include "text.h"

namespace gpu {

namespace {

constexpr int kShownWork = 64;  // of a stream, in a report

thread_local HostWait* outside = nullptr;  // wait of this host thread outside of CUDA

}  // namespace

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::kKernel:
      return "kernel";
    case Kind::kCopy:
      return "copy";
    case Kind::kHostFunction:
      return "host function";
    case Kind::kRecord:
      return "event record";
    case Kind::kWait:
      return "event wait";
  }
  return "";
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
      if (works.size() && stream->queue.size() > kShownWork &&
          work->sequence > stream->completed + kShownWork)
        break;
      std::string state = work->started                   ? work->waits_for
                          : work == stream->queue.front() ? obstacle(*work, *devices_[stream->device])
                                                          : "";
      works += text(
          "%s{\"kind\": \"%s\", \"name\": \"%s\", \"sequence\": %llu, \"position\": %llu, \"started\": %s, "
          "\"sms\": %d%s%s, \"waits_for\": {%s}}",
          works.empty() ? "" : ", ", kind_name(work->kind), escaped(work->name).c_str(),
          static_cast<unsigned long long>(work->sequence), static_cast<unsigned long long>(work->position),
          work->started ? "true" : "false", work->sms, work->label.empty() ? "" : ", ", work->label.c_str(),
          state.c_str());
    }
    streams +=
        text("%s{\"device\": %d, \"stream\": %llu, \"queue\": %d, \"work\": [%s]}",
             streams.empty() ? "" : ", ", stream->device, stream->id, stream->connection, works.c_str());
  }
  for (HostWait* wait : host_waits_) {
    std::string tickets;
    for (const Ticket& ticket : wait->tickets) {
      if (!ticket.open()) continue;
      tickets +=
          text("%s{\"device\": %d, \"stream\": %llu, \"sequence\": %llu}", tickets.empty() ? "" : ", ",
               ticket.stream->device, ticket.stream->id, static_cast<unsigned long long>(ticket.sequence));
    }
    hosts += text("%s{\"call\": \"%s\", \"for\": [%s]%s%s}", hosts.empty() ? "" : ", ", wait->call.c_str(),
                  tickets.c_str(), wait->target.empty() ? "" : ", ", wait->target.c_str());
  }
  std::string recent;
  for (const std::string& label : recent_) recent += (recent.empty() ? "{" : ", {") + label + "}";
  const char* node = getenv("HOLMES_LAB_NODE");
  return text("{\"progress\": %llu, \"node\": \"%s\", \"streams\": [%s], \"hosts\": [%s], \"recent\": [%s]}",
              static_cast<unsigned long long>(progress_count()), node ? node : "", streams.c_str(),
              hosts.c_str(), recent.c_str());
}

}  // namespace gpu

extern "C" {

void egpuWaitsFor(egpuRunning kernel, const char* json_members) {
  gpu::Scheduler::instance().set_waits_for(*reinterpret_cast<gpu::Work*>(kernel), json_members);
}

void egpuHostWaits(const char* call, const char* target) {
  gpu::Scheduler::instance().host_waits(call, target);
}

void egpuProgress(void) { gpu::Scheduler::instance().progress(); }

void egpuFail(egpuRunning kernel, const char* message) {
  gpu::Work& work = *reinterpret_cast<gpu::Work*>(kernel);
  gpu::Scheduler::instance().fail(work.stream->device, work.name + ": " + message);
}
}
