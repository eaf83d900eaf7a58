// Strings, and the settings that the lab hands over in the environment.
#pragma once

#include <string>

namespace gpu {

// As printf.
std::string text(const char* format, ...) __attribute__((format(printf, 1, 2)));

// As the inside of a JSON string.
std::string escaped(const std::string& plain);

// The rank as the lab started it, else the number in RANK, 0 without.
int rank_of_process();

// A name as a C++ source has it, where it is a mangled one.
std::string readable(const char* symbol);

// The innermost operator of torch among the calls of this thread ("aten::add.Tensor"), "" where there is
// none.
std::string operator_of_thread();

}  // namespace gpu
