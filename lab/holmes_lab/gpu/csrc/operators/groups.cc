// Names and descriptions of torch's process groups, for csrc/nccl.

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <exception>
#include <string>

namespace {

// torch's description of a group that was created without one.
const char* const kNoDescription = "undefined";

}  // namespace

// The process group whose collective this host thread calls: torch notes it for its profilers while a
// collective is launched (RECORD_PARAM_COMMS). Returns the description that its maker gave it (group_desc),
// else torch's name for it; "" outside a collective.
extern "C" const char* egpuProcessGroup(void) {
  thread_local std::string name;
  auto* known = c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PARAM_COMMS_INFO);
  auto* info = dynamic_cast<torch::ParamCommsDebugInfo*>(known);
  name = info ? info->getProcessGroupDesc() : "";
  if (info && (name.empty() || name == kNoDescription)) name = info->getProcessGroupName();
  return name.c_str();
}

// The description (group_desc) of the process group that torch has registered under `name`. nullptr if there
// is no such group: torch registers a group after it has made the group's communicator. "" if the group has
// no description.
extern "C" const char* egpuGroupDescription(const char* name) {
  thread_local std::string description;
  try {
    description = c10d::resolve_process_group(name)->getGroupDesc();
  } catch (const std::exception&) {
    return nullptr;
  }
  if (description == kNoDescription) description.clear();
  return description.c_str();
}
