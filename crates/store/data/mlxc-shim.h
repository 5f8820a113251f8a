#pragma once
#include <string>
#if __has_include(<format>)
#include <format>
#else
namespace std {
template <class... A> inline string format(const char* f, A&&...) { return f; }
}
#endif
