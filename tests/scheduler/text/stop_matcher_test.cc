#include "scheduler/text/stop_matcher.h"

#include <gtest/gtest.h>

#include "tests/scheduler/text/text_fixtures.h"

namespace zipage {
namespace {

struct Outcome {
  std::string text;
  std::optional<size_t> stop;
};

// The definition: leftmost match, of those the one that ends first, of those the first named.
Outcome Naive(const std::string& text, const std::vector<std::string>& stops, bool include) {
  for (size_t begin = 0; begin < text.size(); ++begin) {
    std::optional<size_t> best;
    for (size_t i = 0; i < stops.size(); ++i) {
      if (stops[i].empty() || text.compare(begin, stops[i].size(), stops[i]) != 0) continue;
      if (!best || stops[i].size() < stops[*best].size()) best = i;
    }
    if (best) return {text.substr(0, begin + (include ? stops[*best].size() : 0)), best};
  }
  return {text, std::nullopt};
}

// The longest end of `text` that begins a stop string: all that may be held back.
size_t MayHold(const std::string& text, const std::vector<std::string>& stops) {
  size_t hold = 0;
  for (const std::string& stop : stops) {
    for (size_t n = 1; n < stop.size() && n <= text.size(); ++n) {
      if (text.compare(text.size() - n, n, stop, 0, n) == 0) hold = std::max(hold, n);
    }
  }
  return hold;
}

void CheckAgainstNaive(const std::vector<std::string>& pieces,
                       const std::vector<std::string>& stops, bool include) {
  StopMatcher matcher(std::make_shared<StopSet>(stops), include);
  std::string all;
  Outcome got;
  for (const std::string& piece : pieces) {
    all += piece;
    StopMatcher::Result result = matcher.Push(piece);
    if (got.stop) {
      EXPECT_EQ(result.text, "");
      EXPECT_FALSE(result.stop.has_value());
      continue;
    }
    got.text += result.text;
    got.stop = result.stop;
    if (!got.stop) {
      EXPECT_EQ(got.text.size() + MayHold(all, stops), all.size()) << "held back too much";
    }
  }
  StopMatcher::Result rest = matcher.Flush();
  got.text += rest.text;
  if (rest.stop) got.stop = rest.stop;
  Outcome want = Naive(all, stops, include);
  EXPECT_EQ(got.text, want.text) << all;
  EXPECT_EQ(got.stop, want.stop) << all;
}

TEST(StopMatcherTest, EqualsTheNaiveSearchOnRandomText) {
  std::mt19937_64 rng(11);
  for (int round = 0; round < 20'000; ++round) {
    std::vector<std::string> stops(Pick(&rng, 4));
    for (std::string& stop : stops) {
      for (size_t n = Pick(&rng, 6); n > 0; --n) stop += "ab"[Pick(&rng, 2)];
    }
    std::vector<std::string> pieces(Pick(&rng, 8));
    for (std::string& piece : pieces) {
      for (size_t n = Pick(&rng, 5); n > 0; --n) piece += "abc"[Pick(&rng, 3)];
    }
    CheckAgainstNaive(pieces, stops, round % 2 == 0);
    if (HasFailure()) return;
  }
}

TEST(StopMatcherTest, MatchesInsideMultiByteTextAndAcrossPieces) {
  CheckAgainstNaive({"日本", "語。終", "わりです"}, {"終わり", "。終x"}, false);
  CheckAgainstNaive({"日本語"}, {"\u3042"}, false);  // shares its first byte only
  CheckAgainstNaive({"ab", "c"}, {"abcd", "bc"}, false);
  CheckAgainstNaive({"aab", "aac"}, {"aabaacx", "baa", "ac"}, true);
}

TEST(StopMatcherTest, TheLeftmostWinsEvenIfAnotherEndsFirst) {
  StopMatcher matcher(std::make_shared<StopSet>(std::vector<std::string>{"abcd", "bc"}), false);
  StopMatcher::Result result = matcher.Push("xabc");
  EXPECT_EQ(result.text, "x");
  EXPECT_FALSE(result.stop.has_value());
  result = matcher.Push("d!");
  EXPECT_EQ(result.text, "");
  EXPECT_EQ(result.stop, 0u);
  EXPECT_EQ(matcher.Flush().text, "");
}

TEST(StopMatcherTest, WithoutStopsTextPassesThrough) {
  StopMatcher matcher(std::make_shared<StopSet>(std::vector<std::string>{""}), false);
  EXPECT_EQ(matcher.Push("anything").text, "anything");
  EXPECT_EQ(matcher.Flush().text, "");
}

TEST(StopMatcherTest, LongOverlappingStopsStayLinear) {
  std::string stop(20'000, 'a');
  StopMatcher matcher(std::make_shared<StopSet>(std::vector<std::string>{stop + "b"}), false);
  std::string out;
  for (int i = 0; i < 2'000; ++i) out += matcher.Push(std::string(100, 'a')).text;
  EXPECT_EQ(out.size(), 180'000u);
  StopMatcher::Result result = matcher.Push("b");
  EXPECT_EQ(result.stop, 0u);
  EXPECT_EQ(result.text, "");
}

}  // namespace
}  // namespace zipage
