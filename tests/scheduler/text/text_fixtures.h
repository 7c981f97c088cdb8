#pragma once
// Where the fixtures of the text room are, and random text to break it with.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "scheduler/text/utf8.h"

namespace zipage {

inline std::string GoldenDir() { return ZIPAGE_SOURCE_DIR "/tests/golden/tokenizer"; }

// The large fixtures that are not part of the repository.
inline std::string SharedDir() {
  const char* dir = std::getenv("ZIPAGE_SHARED_DIR");
  return dir != nullptr ? dir : ZIPAGE_SOURCE_DIR "/../shared";
}

inline bool HasShared() { return std::filesystem::exists(SharedDir() + "/golden/tokenizer"); }

inline std::string ReadAll(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream out;
  out << in.rdbuf();
  return out.str();
}

inline std::vector<nlohmann::ordered_json> ReadJsonLines(const std::string& path) {
  std::vector<nlohmann::ordered_json> rows;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    rows.push_back(nlohmann::ordered_json::parse(line));
  }
  return rows;
}

inline size_t Pick(std::mt19937_64* rng, size_t n) { return static_cast<size_t>((*rng)() % n); }

inline std::string RandomBytes(std::mt19937_64* rng, size_t n) {
  std::string out(n, '\0');
  for (char& c : out) c = static_cast<char>((*rng)());
  return out;
}

// Valid UTF-8 from characters that tokenizers treat differently, and some from anywhere.
inline std::string RandomText(std::mt19937_64* rng, size_t num_parts) {
  static const char* const kParts[] = {
      "a",      "Z",          "the",      " ",      "  ", "\n",    "\r\n",   "\t",
      "0",      "42",         "'s",       "'T",     "!",  "...",   "é",      "ñ",
      "日",     "本",         "👍🏽", "\u200d", "½",  "٣",     "\u00a0", "\u3000",
      "\u2028", "<|im_end|>", "<|",       "\u0085", "ſ",  "\u0301"};
  std::string out;
  for (size_t i = 0; i < num_parts; ++i) {
    if (Pick(rng, 8) == 0) {
      AppendUtf8(static_cast<char32_t>(Pick(rng, 0x11000) * 16 + Pick(rng, 16)), &out);
    } else {
      out += kParts[Pick(rng, std::size(kParts))];
    }
  }
  return out;
}

}  // namespace zipage
