#include "races.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "text.h"
#include "watch.h"

namespace gpu {

namespace {

constexpr size_t kTold = 64;  // of a process

void join(std::vector<uint64_t>* clock, const std::vector<uint64_t>& other) {
  clock->resize(std::max(clock->size(), other.size()));
  for (size_t index = 0; index < other.size(); ++index)
    (*clock)[index] = std::max((*clock)[index], other[index]);
}

}  // namespace

std::string described(const Work& work) {
  return text("\"kind\": \"%s\", \"name\": \"%s\", \"stream\": %llu%s%s", kind_name(work.kind),
              escaped(work.name).c_str(), work.stream->id, work.label.empty() ? "" : ", ",
              work.label.c_str());
}

size_t Races::number_of(const Stream& stream) {
  auto [found, added] = numbers_.emplace(stream.id, orders_.size());
  if (added) orders_.emplace_back();
  return found->second;
}

// The knowledge of the stream (races.h) after its work of that number.
Races::Clock Races::clock_at(size_t stream, uint64_t sequence) const {
  Clock clock;
  const auto& kept = orders_[stream].kept;
  auto after = std::upper_bound(kept.begin(), kept.end(), sequence,
                                [](uint64_t number, auto& one) { return number < one.first; });
  if (after != kept.begin()) clock = std::prev(after)->second;
  clock.resize(std::max(clock.size(), stream + 1));
  clock[stream] = std::max(clock[stream], sequence);
  return clock;
}

void Races::launch(const Work& work) {
  size_t stream = number_of(*work.stream);
  Clock before = host_;
  for (const Ticket& ticket : work.after)
    join(&before, clock_at(number_of(*ticket.stream), ticket.sequence - ticket.begun));
  Order& order = orders_[stream];
  join(&order.clock, before);
  order.clock.resize(std::max(order.clock.size(), stream + 1));
  order.clock[stream] = work.sequence;
  if (!work.after.empty() || work.kind == Kind::kRecord) order.kept.emplace_back(work.sequence, order.clock);
  if (work.accesses.empty()) return;
  Use use{stream, work.sequence,
          std::make_shared<Whose>(Whose{text("%s in %zu", work.name.c_str(), stream), described(work)})};
  for (const Access& access : work.accesses) touch(access, use, order.clock);
}

void Races::host_knows(const Ticket& ticket) {
  if (!ticket.stream) return;
  size_t stream = number_of(*ticket.stream);
  uint64_t sequence = ticket.sequence - ticket.begun;
  join(&host_, clock_at(stream, sequence));
  auto& kept = orders_[stream].kept;  // older work: no stream can know more about it than the host
  while (kept.size() > 1 && kept[1].first <= sequence) kept.pop_front();
}

bool Races::known_to_host(const char* begin, size_t size) {
  for (auto piece = split(begin), end = split(begin + size); piece != end; ++piece) {
    for (const Use& use : piece->second.writes) {
      if (use.stream >= host_.size() || host_[use.stream] < use.sequence) return false;
    }
  }
  return true;
}

// The first piece that begins there or behind; one that reaches over `at` becomes two.
Races::Pieces::iterator Races::split(const char* at) {
  auto piece = memory_.lower_bound(at);
  if (piece == memory_.begin()) return piece;
  auto before = std::prev(piece);
  if (before->second.end <= at) return piece;
  Piece right = before->second;
  before->second.end = at;
  return memory_.emplace_hint(piece, at, std::move(right));
}

void Races::touch(const Access& access, const Use& use, const Clock& clock) {
  if (access.size == 0) return;
  const char *begin = static_cast<const char*>(access.begin), *end = begin + access.size;
  auto last = split(end), first = split(begin);
  for (auto piece = first; piece != last; ++piece) {
    check(piece->second.writes, true, use, clock, access);
    if (access.writes) check(piece->second.reads, false, use, clock, access);
  }
  if (access.writes) {
    memory_.erase(first, last);
    memory_[begin] = {end, {use}, {}};
    return;
  }
  const char* at = begin;
  auto add_gap = [&](Pieces::iterator next, const char* until) {
    if (at < until) memory_.emplace_hint(next, at, Piece{until, {}, {use}});
  };
  for (auto piece = first; piece != last; ++piece) {
    add_gap(piece, piece->first);
    auto& reads = piece->second.reads;
    auto same = std::find_if(reads.begin(), reads.end(), [&](auto& one) { return one.stream == use.stream; });
    if (same == reads.end()) {
      reads.push_back(use);
    } else {
      *same = use;
    }
    at = piece->second.end;
  }
  add_gap(last, end);
}

void Races::check(const std::vector<Use>& before, bool wrote, const Use& use, const Clock& clock,
                  const Access& access) {
  for (const Use& other : before) {
    if (other.stream < clock.size() && other.sequence <= clock[other.stream]) continue;
    std::string pair =
        text("%s %d %s %d", other.whose->what.c_str(), wrote, use.whose->what.c_str(), access.writes);
    if (told_.size() == kTold || !told_.insert(pair).second) continue;
    tell_race(text("\"bytes\": %zu, \"first\": {%s, \"writes\": %s}, \"second\": {%s, \"writes\": %s}",
                   access.size, other.whose->members.c_str(), wrote ? "true" : "false",
                   use.whose->members.c_str(), access.writes ? "true" : "false"));
  }
}

namespace {

// The lines about the running thread in the last output of Python's faulthandler.
std::string current_stack(const std::string& path) {
  std::ifstream file(path);
  std::string line, found;
  for (bool current = false; std::getline(file, line);) {
    if (line.rfind("  File", 0) != 0) {
      current = line.rfind("Current thread", 0) == 0;
    } else if (current) {
      found += line + "\n";
    }
  }
  return found;
}

}  // namespace

void tell_race(const std::string& members) {
  const char* directory = getenv("HOLMES_GPU_WATCH");
  if (!directory || !*directory) return;
  std::string base = text("%s/rank%d", directory, rank_of_process()), stack = base + ".stack";
  python_stacks();
  std::ofstream(base + ".races", std::ios::app)
      << "{" << members << ", \"stack\": \"" << escaped(current_stack(stack)) << "\"}" << std::endl;
  if (truncate(stack.c_str(), 0) != 0) return;  // there is none
}

}  // namespace gpu
