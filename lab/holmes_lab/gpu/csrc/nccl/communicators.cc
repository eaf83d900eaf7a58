// Reports each new communicator to the lab, as a line of JSON in
// HOLMES_GPU_WATCH/rank<N>.communicators:
//     {"communicator", "rank", "ranks", "group", "network", "self", "members": [...]}
// self and members: processes, by the hashes that NCCL knows them by. When a better name for its group is
// known later, another line reports it:
//     {"communicator", "group"}
// Also describes launches, for the report of a job that hangs.
//
// The name of a group comes from one of these:
//     NCCL's config.commName      set by the program, or by torch's ProcessGroupNCCL2: torch's name of the group
//     torch's group_desc          of the group with that name (csrc/operators/groups.cc)
//     torch's running collective  where commName is not set (torch's older ProcessGroupNCCL)

#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "bootstrap.h"
#include "comm.h"
#include "emulated_gpu.h"
#include "enqueue.h"
#include "graph.h"
#include "text.h"
#include "transport.h"
#include "utils.h"

// Linked by --wrap: NCCL's own functions of these names (__real_), and their replacements (__wrap_).
#define WRAPPED(result, alias, mangled, ...)                   \
  result real_##alias(__VA_ARGS__) __asm__("__real_" mangled); \
  result alias(__VA_ARGS__) __asm__("__wrap_" mangled);

WRAPPED(ncclResult_t, launch, "_Z16ncclLaunchKernelP8ncclCommP14ncclKernelPlan", ncclComm* comm,
        ncclKernelPlan* plan)
// The last step of every communicator's initialization that has a name.
WRAPPED(ncclResult_t, tune, "_Z17ncclTopoTuneModelP8ncclCommiiPP13ncclTopoGraph", ncclComm* comm, int least,
        int most, ncclTopoGraph** graphs)

// Where a rank waits until its peer sets up the connection between them.
WRAPPED(ncclResult_t, receive, "_Z13bootstrapRecvPviiS_i", void* state, int peer, int tag, void* data,
        int size)

namespace {

std::mutex hashes_mutex;
std::map<void*, unsigned long long>& hashes() {  // of communicators, by their bootstrap
  static auto* made = new std::map<void*, unsigned long long>;
  return *made;
}

std::mutex names_mutex;
std::map<uint64_t, std::string>& names() {  // of communicators' groups, by the communicator's hash
  static auto* made = new std::map<uint64_t, std::string>;
  return *made;
}

// A communicator whose name may be one that torch gave its group: "3", or a hash.
struct Undescribed {
  std::string name;
  int launches_left;  // torch is asked for a description at so many further launches
};
constexpr int kLaunchesToAsk = 256;
std::map<uint64_t, Undescribed>& undescribed() {  // by the communicator's hash
  static auto* made = new std::map<uint64_t, Undescribed>;
  return *made;
}

std::string name_of(const ncclComm* comm) {
  std::lock_guard<std::mutex> lock(names_mutex);
  auto found = names().find(comm->commHash);
  return found == names().end() ? "" : gpu::escaped(found->second);
}

// Remembers a communicator's first name: the one in its configuration, else that of the process group that
// calls it now. Returns whether it has got one.
bool learn_name(const ncclComm* comm) {
  static auto* running_group = reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, "egpuProcessGroup"));
  std::string name;
  if (comm->config.commName) {
    name = comm->config.commName;
  } else if (running_group) {
    name = running_group();
  }
  std::lock_guard<std::mutex> lock(names_mutex);
  bool is_new = !name.empty() && names().emplace(comm->commHash, name).second;
  if (is_new && comm->config.commName) undescribed()[comm->commHash] = {name, kLaunchesToAsk};
  return is_new;
}

// Asks torch for the descriptions of groups that it had not registered yet when their communicators were made.
// Returns the communicators' hashes and new names.
std::map<uint64_t, std::string> learn_descriptions() {
  static auto* description_of =
      reinterpret_cast<const char* (*)(const char*)>(dlsym(RTLD_DEFAULT, "egpuGroupDescription"));
  std::map<uint64_t, std::string> learned;
  if (!description_of) return learned;
  std::lock_guard<std::mutex> lock(names_mutex);
  for (auto item = undescribed().begin(); item != undescribed().end();) {
    auto& [hash, group] = *item;
    const char* description = description_of(group.name.c_str());
    if (description && *description) learned[hash] = names()[hash] = description;
    bool done = description || --group.launches_left == 0;
    item = done ? undescribed().erase(item) : std::next(item);
  }
  return learned;
}

// Appends a line to this rank's file for the lab.
void write_line(const std::string& line) {
  const char* directory = std::getenv("HOLMES_GPU_WATCH");
  if (!directory || !*directory) return;
  std::string path = gpu::text("%s/rank%d.communicators", directory, gpu::rank_of_process());
  int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) return;
  if (write(file, line.data(), line.size()) < 0) perror(path.c_str());
  close(file);
}

void tell_name(uint64_t hash, const std::string& name) {
  write_line(gpu::text("{\"communicator\": \"0x%llx\", \"group\": \"%s\"}\n", (unsigned long long)hash,
                       gpu::escaped(name).c_str()));
}

void tell(const ncclComm* comm) {
  const ncclPeerInfo& mine = comm->peerInfo[comm->rank];
  auto process = [&](int rank) {
    const ncclPeerInfo& peer = comm->peerInfo[rank];
    return gpu::text("\"%llx:%llx\"", (unsigned long long)(peer.hostHash - mine.hostHash + getHostHash()),
                     (unsigned long long)(peer.pidHash - mine.pidHash + getPidHash()));
  };
  std::string members;
  for (int rank = 0; rank < comm->nRanks; ++rank) members += (rank ? ", " : "") + process(rank);
  write_line(gpu::text(
      "{\"communicator\": \"0x%llx\", \"rank\": %d, \"ranks\": %d, \"group\": \"%s\", \"network\": \"%s\", "
      "\"self\": %s, \"members\": [%s]}\n",
      (unsigned long long)comm->commHash, comm->rank, comm->nRanks, name_of(comm).c_str(),
      comm->ncclNet ? comm->ncclNet->name : "", process(comm->rank).c_str(), members.c_str()));
}

constexpr size_t kShown = 200;  // characters of a kernel's description

std::string work_of(ncclKernelPlan* plan) {
  std::string what;
  auto add = [&](const std::string& item) {
    if (what.size() < kShown) what += (what.empty() ? "" : ", ") + item;
  };
  for (auto* task = ncclIntruQueueHead(&plan->collTaskQueue); task; task = task->next) {
    const char* type = ncclDatatypeToString(task->datatype);  // "ncclFloat32"
    add(gpu::text("%s of %zu %s", ncclFuncToString(task->func), task->count, type + std::strlen("nccl")));
  }
  for (auto* task = ncclIntruQueueHead(&plan->p2pTaskQueue); task; task = task->next) {
    bool sends = task->func == ncclFuncSend;
    add(gpu::text("%s %d (%zu bytes)", sends ? "Send to" : "Recv from", task->root, task->bytes));
  }
  return what;
}

// Number of this launch among the communicator's launches with collectives (all ranks must launch these in
// the same order); -1: the launch only sends and receives.
long long collective_number(const ncclComm* comm, ncclKernelPlan* plan) {
  static std::mutex mutex;
  static auto* counts = new std::map<uint64_t, long long>;
  if (!ncclIntruQueueHead(&plan->collTaskQueue)) return -1;
  std::lock_guard<std::mutex> lock(mutex);
  return (*counts)[comm->commHash]++;
}

// Memory that a plan reads and writes, for the search for missing waits.
void describe_accesses(const ncclComm* comm, ncclKernelPlan* plan) {
  std::vector<egpuAccess> accesses;
  for (auto* task = ncclIntruQueueHead(&plan->collTaskQueue); task; task = task->next) {
    size_t part = task->count * ncclTypeSize(task->datatype), whole = part * comm->nRanks;
    bool root = comm->rank == task->root;
    if (task->func != ncclFuncBroadcast || root)
      accesses.push_back({task->sendbuff, task->func == ncclFuncReduceScatter ? whole : part, false});
    if (task->func != ncclFuncReduce || root)
      accesses.push_back({task->recvbuff, task->func == ncclFuncAllGather ? whole : part, true});
  }
  for (auto* task = ncclIntruQueueHead(&plan->p2pTaskQueue); task; task = task->next)
    accesses.push_back({task->buff, task->bytes, task->func == ncclFuncRecv});
  egpuDescribeAccesses(accesses.data(), accesses.size());
}

}  // namespace

ncclResult_t tune(ncclComm* comm, int least, int most, ncclTopoGraph** graphs) {
  {
    std::lock_guard<std::mutex> lock(hashes_mutex);
    hashes()[comm->bootstrap] = comm->commHash;
  }
  learn_name(comm);
  tell(comm);
  return real_tune(comm, least, most, graphs);
}

ncclResult_t launch(ncclComm* comm, ncclKernelPlan* plan) {
  if (learn_name(comm)) {
    std::lock_guard<std::mutex> lock(names_mutex);
    tell_name(comm->commHash, names()[comm->commHash]);
  }
  for (const auto& [hash, name] : learn_descriptions()) tell_name(hash, name);
  std::string label = gpu::text(
      "\"communicator\": \"0x%llx\", \"group\": \"%s\", \"rank\": %d, \"ranks\": %d, \"number\": %llu, "
      "\"collective\": %lld, \"what\": \"%s\"",
      (unsigned long long)comm->commHash, name_of(comm).c_str(), comm->rank, comm->nRanks,
      (unsigned long long)comm->opCount, collective_number(comm, plan), work_of(plan).c_str());
  egpuDescribeLaunch(label.c_str());
  if (egpuSearchesRaces()) describe_accesses(comm, plan);
  ncclResult_t result = real_launch(comm, plan);
  egpuDescribeLaunch("");
  return result;
}

ncclResult_t receive(void* state, int peer, int tag, void* data, int size) {
  unsigned long long hash = 0;
  {
    std::lock_guard<std::mutex> lock(hashes_mutex);
    auto found = hashes().find(state);
    if (found != hashes().end()) hash = found->second;
  }
  if (!hash) return real_receive(state, peer, tag, data, size);
  egpuHostWaits("NCCL, to connect to",
                gpu::text("\"communicator\": \"0x%llx\", \"peer\": %d", hash, peer).c_str());
  ncclResult_t result = real_receive(state, peer, tag, data, size);
  egpuHostWaits(nullptr, nullptr);
  return result;
}
