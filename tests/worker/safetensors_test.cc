#include "worker/model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/worker/test_files.h"

namespace zipage {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using testing::SafetensorsBytes;
using testing::TempDir;
using testing::TestTensor;

std::string Error(const std::string& file) {
  const auto parsed = ParseSafetensors(file, "w.safetensors");
  EXPECT_TRUE(absl::IsDataLoss(parsed.status())) << parsed.status();
  const std::string message(parsed.status().message());
  EXPECT_THAT(message, HasSubstr("w.safetensors"));
  EXPECT_THAT(message, Not(HasSubstr("\n")));
  return message;
}

// One tensor "a" of 8 bytes of data, with this text as its description.
std::string HeaderError(const std::string& entry) {
  return Error(SafetensorsBytes("{\"a\":" + entry + "}", std::string(8, 'x')));
}

std::vector<TestTensor> SomeTensors() {
  return {{"w", "F32", {2, 3}, std::string(24, 'w')},
          {"none", "F32", {0, 5}, ""},
          {"scalar", "I64", {}, std::string(8, 's')},
          {"half", "BF16", {5}, std::string(10, 'h')},
          {"nibbles", "F4", {2, 2}, std::string(2, 'n')}};
}

TEST(SafetensorsTest, FindsEveryTensorOfAWellFormedFile) {
  const std::string file = SafetensorsBytes(SomeTensors());
  const auto parsed = ParseSafetensors(file, "w.safetensors");
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  ASSERT_EQ(parsed->size(), 5U);
  for (const TestTensor& tensor : SomeTensors()) {
    const auto it = std::find_if(parsed->begin(), parsed->end(),
                                 [&](const auto& entry) { return entry.name == tensor.name; });
    ASSERT_NE(it, parsed->end()) << tensor.name;
    EXPECT_EQ(it->dtype, tensor.dtype);
    EXPECT_EQ(it->shape, tensor.shape);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(it->data), it->bytes), tensor.bytes);
  }
  EXPECT_TRUE(ParseSafetensors(SafetensorsBytes("{}", ""), "empty").ok());
}

TEST(SafetensorsTest, RefusesAFileCutAnywhere) {
  const std::string file = SafetensorsBytes(SomeTensors());
  for (size_t length = 0; length < file.size(); ++length) {
    Error(file.substr(0, length));
  }
  EXPECT_THAT(Error(file.substr(0, 7)), HasSubstr("7 bytes"));
  EXPECT_THAT(Error(file.substr(0, 20)), HasSubstr("cut off"));
  EXPECT_THAT(Error(file.substr(0, file.size() - 1)), HasSubstr("data_offsets"));
}

TEST(SafetensorsTest, RecognisesAGitLfsPointer) {
  const std::string pointer =
      "version https://git-lfs.github.com/spec/v1\n"
      "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
      "size 1234567890\n";
  ASSERT_EQ(pointer.size(), 135U);
  const TempDir dir;
  dir.Write("model.safetensors", pointer);
  const absl::Status status = SafetensorsFile::Open(dir.File("model.safetensors")).status();
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(dir.File("model.safetensors")));
  EXPECT_THAT(std::string(status.message()), HasSubstr("git lfs pull"));
}

TEST(SafetensorsTest, BoundsTheHeaderLength) {
  EXPECT_THAT(Error(std::string(8, '\xff') + "{}"), HasSubstr("18446744073709551615"));
  std::string file = SafetensorsBytes("{}", "");
  file[3] = 6;  // 100 million and some
  EXPECT_THAT(Error(file), HasSubstr("above the limit"));
  file[3] = 1;
  EXPECT_THAT(Error(file), HasSubstr("cut off"));
  EXPECT_THAT(Error("<!DOCTYPE html><html>404</html>"), HasSubstr("no safetensors file"));
}

TEST(SafetensorsTest, RefusesOffsetsThatDoNotCoverTheDataOnce) {
  const auto two = [](const std::string& a, const std::string& b) {
    return Error(
        SafetensorsBytes("{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" + a +
                             "},\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":" + b + "}}",
                         std::string(8, 'x')));
  };
  EXPECT_THAT(two("[0,4]", "[2,6]"), HasSubstr("\"b\" overlaps"));
  EXPECT_THAT(two("[0,4]", "[0,4]"), HasSubstr("overlaps"));
  EXPECT_THAT(two("[1,5]", "[5,9]"), HasSubstr("[5, 9]"));
  EXPECT_THAT(two("[4,0]", "[4,8]"), HasSubstr("[4, 0]"));
  EXPECT_THAT(two("[0,4]", "[4,18446744073709551615]"), HasSubstr("18446744073709551615"));
  EXPECT_THAT(HeaderError(R"({"dtype":"U8","shape":[4],"data_offsets":[4,8]})"),
              HasSubstr("4 bytes before tensor \"a\""));
  EXPECT_THAT(HeaderError(R"({"dtype":"U8","shape":[4],"data_offsets":[0,4]})"),
              HasSubstr("4 bytes at the end"));
}

TEST(SafetensorsTest, RefusesShapesThatDoNotFitTheirBytes) {
  EXPECT_THAT(HeaderError(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})"),
              HasSubstr("needs 12 bytes, but its data_offsets span 8"));
  // 2^32 * 2^32 elements wrap to none.
  EXPECT_THAT(HeaderError(R"({"dtype":"U8","shape":[4294967296,4294967296],"data_offsets":[0,0]})"),
              HasSubstr("overflows"));
  EXPECT_THAT(HeaderError(R"({"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,8]})"),
              HasSubstr("dimension"));
  EXPECT_THAT(HeaderError(R"({"dtype":"F4","shape":[3],"data_offsets":[0,1]})"),
              HasSubstr("overflows"));
  EXPECT_THAT(HeaderError(R"({"dtype":"F128","shape":[1],"data_offsets":[0,8]})"),
              HasSubstr("unknown type \"F128\""));
  EXPECT_THAT(HeaderError(R"({"dtype":"U8","shape":[1,1,1,1,1,1,1,1,8],"data_offsets":[0,8]})"),
              HasSubstr("8 dimensions"));
}

TEST(SafetensorsTest, RefusesWhateverIsNotTheGrammar) {
  for (const char* entry :
       {"1", "null", "\"x\"", "[]", "{}", "true", R"({"dtype":"U8","shape":[8]})",
        R"({"dtype":"U8","shape":[8],"data_offsets":[0]})",
        R"({"dtype":"U8","shape":[8],"data_offsets":[0,8,8]})",
        R"({"dtype":"U8","shape":[[8]],"data_offsets":[0,8]})",
        R"({"dtype":"U8","shape":8,"data_offsets":[0,8]})",
        R"({"dtype":"U8","shape":[8.0],"data_offsets":[0,8]})",
        R"({"dtype":"U8","shape":[-8],"data_offsets":[0,8]})",
        R"({"dtype":"U8","shape":["8"],"data_offsets":[0,8]})",
        R"({"dtype":["U8"],"shape":[8],"data_offsets":[0,8]})",
        R"({"dtype":{"a":1},"shape":[8],"data_offsets":[0,8]})",
        R"({"dtype":"U8","shape":[8],"shape":[8],"data_offsets":[0,8]})",
        R"({"dtype":"U8","shape":[8],"extra":1,"data_offsets":[0,8]})"}) {
    SCOPED_TRACE(entry);
    HeaderError(entry);
  }
  const std::string tensor = R"({"dtype":"U8","shape":[8],"data_offsets":[0,8]})";
  ASSERT_TRUE(ParseSafetensors(SafetensorsBytes("{\"a\":" + tensor + "}", "12345678"), "ok").ok());
  EXPECT_THAT(Error(SafetensorsBytes("{\"a\":" + tensor + ",\"a\":" + tensor + "}", "12345678")),
              HasSubstr("twice, \"a\""));
  for (const char* header : {"", "[]", "1", "{", "{}{}", R"({"__metadata__":{"a":1}})",
                             R"({"__metadata__":{"a":{}}})", R"({"__metadata__":[]})", "\xff{}"}) {
    SCOPED_TRACE(header);
    Error(SafetensorsBytes(header, ""));
  }
  EXPECT_THAT(Error(SafetensorsBytes(std::string(1'000'000, '['), "")), HasSubstr("header has"));
  EXPECT_THAT(Error(SafetensorsBytes(std::string("{\"evil\\nname\":1}"), "")),
              HasSubstr("evil\\nname"));
}

TEST(SafetensorsTest, SurvivesFiftyThousandMutations) {
  const std::string file = SafetensorsBytes(SomeTensors());
  std::mt19937 random(5);
  int accepted = 0;
  for (int round = 0; round < 50'000; ++round) {
    std::string mutated = file;
    for (uint32_t n = random() % 5 + 1; n > 0; --n) {
      const size_t at = random() % mutated.size();
      static constexpr char kLikely[] = "0123456789{}[]\",:-e. ";
      switch (random() % 5) {
        case 0:
          mutated[at] = static_cast<char>(random());
          break;
        case 1:
          mutated.erase(at, random() % 4);
          break;
        case 2:
          mutated.insert(at, mutated.substr(random() % mutated.size(), random() % 9));
          break;
        default:
          mutated[at] = kLikely[random() % (sizeof(kLikely) - 1)];
      }
      if (mutated.empty()) mutated = "x";
    }
    // The exact size on the heap, so that a sanitizer sees a read past the end.
    const std::vector<char> exact(mutated.begin(), mutated.end());
    const auto parsed = ParseSafetensors({exact.data(), exact.size()}, "w.safetensors");
    if (!parsed.ok()) {
      ASSERT_FALSE(parsed.status().message().empty());
      continue;
    }
    ++accepted;
    const auto* begin = reinterpret_cast<const uint8_t*>(exact.data());
    for (const SafetensorsEntry& entry : *parsed) {
      ASSERT_GE(entry.data, begin);
      ASSERT_LE(entry.data + entry.bytes, begin + exact.size());
    }
  }
  EXPECT_GT(accepted, 0);
}

TEST(SafetensorsTest, OpensOnlyRegularFiles) {
  const TempDir dir;
  EXPECT_TRUE(absl::IsNotFound(SafetensorsFile::Open(dir.File("none")).status()));
  EXPECT_FALSE(SafetensorsFile::Open(dir.path()).ok());
  dir.Write("empty", "");
  EXPECT_TRUE(absl::IsDataLoss(SafetensorsFile::Open(dir.File("empty")).status()));
  dir.Write("good", SafetensorsBytes(SomeTensors()));
  const auto file = SafetensorsFile::Open(dir.File("good"));
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ((*file)->entries().size(), 5U);
}

}  // namespace
}  // namespace zipage
