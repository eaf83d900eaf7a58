#include "text.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

namespace gpu {

std::string text(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char* made = nullptr;
  int length = vasprintf(&made, format, arguments);
  va_end(arguments);
  std::string result(made, length);
  free(made);
  return result;
}

std::string escaped(const std::string& plain) {
  std::string result;
  for (char letter : plain) {
    if (letter == '"' || letter == '\\') result += '\\';
    if (static_cast<unsigned char>(letter) < ' ') {
      result += text("\\u%04x", letter);
    } else {
      result += letter;
    }
  }
  return result;
}

// The lab's number comes first: holmes gives the job another RANK on its way.
int rank_of_process() {
  const char* rank = getenv("HOLMES_LAB_RANK");
  if (!rank) rank = getenv("RANK");
  return rank ? atoi(rank) : 0;
}

std::string readable(const char* symbol) {
  int status = 0;
  char* made = abi::__cxa_demangle(symbol, nullptr, nullptr, &status);
  std::string result = status == 0 && made ? made : symbol;
  free(made);
  return result;
}

// torch names the entry of every operator at::_ops::NAME_OVERLOAD::call or ::redispatch.
std::string operator_of_thread() {
  void* frames[96];
  int count = backtrace(frames, 96);
  for (int index = 0; index < count; ++index) {
    Dl_info found;
    if (!dladdr(frames[index], &found) || !found.dli_sname) continue;
    std::string name = readable(found.dli_sname);
    size_t begin = name.find("at::_ops::");
    if (begin == std::string::npos) continue;
    begin += 10;
    return "aten::" + name.substr(begin, name.find("::", begin) - begin);
  }
  return "";
}

}  // namespace gpu
