#include "proto/curve_keys.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>

#include "proto/transport.h"
#include "tests/proto/random_messages.h"

namespace zipage::transport {
namespace {

using ::testing::HasSubstr;

class CurveKeysTest : public ::testing::Test {
 protected:
  ~CurveKeysTest() override { unlink(path_.c_str()); }

  void Write(const std::string& text, mode_t mode = 0600) {
    unlink(path_.c_str());  // Some file systems flush a file that is written over.
    std::ofstream(path_) << text;
    chmod(path_.c_str(), mode);
  }

  const std::string path_ = ::testing::TempDir() + "/curve_keys_test." + std::to_string(getpid());
};

TEST_F(CurveKeysTest, WritesAPrivateFileAndReadsItBack) {
  for (int i = 0; i < 50; ++i) {
    const CurveKeys keys = GenerateCurveKeys();
    ASSERT_TRUE(WriteCurveKeyFile(path_, keys).ok());
    struct stat info = {};
    ASSERT_EQ(stat(path_.c_str(), &info), 0);
    EXPECT_EQ(info.st_mode & 0777, 0600U);
    const auto back = ReadCurveKeyFile(path_);
    ASSERT_TRUE(back.ok()) << back.status();
    EXPECT_EQ(back->public_key, keys.public_key);
    EXPECT_EQ(back->secret_key, keys.secret_key);
    EXPECT_EQ(WriteCurveKeyFile(path_, GenerateCurveKeys()).code(),
              absl::StatusCode::kAlreadyExists);
    EXPECT_EQ(ReadCurveKeyFile(path_)->secret_key, keys.secret_key);
    unlink(path_.c_str());
  }
  EXPECT_FALSE(WriteCurveKeyFile("/no/such/directory/key", GenerateCurveKeys()).ok());
}

TEST_F(CurveKeysTest, RefusesASecretThatOthersCanRead) {
  ASSERT_TRUE(WriteCurveKeyFile(path_, GenerateCurveKeys()).ok());
  chmod(path_.c_str(), 0640);
  EXPECT_EQ(ReadCurveKeyFile(path_).status().code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(std::string(ReadCurveKeyFile(path_).status().message()), HasSubstr("chmod 600"));
}

TEST_F(CurveKeysTest, RefusesBrokenFilesWithoutShowingSecrets) {
  const CurveKeys keys = GenerateCurveKeys();
  const std::string good_public = "public = " + keys.public_key + "\n";
  const std::string good_secret = "secret = " + keys.secret_key + "\n";
  for (const std::string& text :
       {std::string(), good_public, good_secret, good_public + good_secret + "more\n",
        good_public + good_public + good_secret,
        good_public + "secret = " + keys.secret_key + "x\n",
        good_public + "secret " + keys.secret_key + "\n", std::string(2 << 20, 'x')}) {
    Write(text);
    const auto read = ReadCurveKeyFile(path_);
    ASSERT_FALSE(read.ok());
    EXPECT_THAT(std::string(read.status().message()), HasSubstr(path_));
    EXPECT_THAT(std::string(read.status().message()), ::testing::Not(HasSubstr(keys.secret_key)));
  }
  EXPECT_EQ(ReadCurveKeyFile(path_ + ".none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_FALSE(ReadCurveKeyFile(::testing::TempDir()).ok());
}

TEST_F(CurveKeysTest, ReadsAListOfClients) {
  std::string text = "# the team\n\n";
  std::vector<std::string> keys;
  for (int i = 0; i < 100; ++i) {
    keys.push_back(GenerateCurveKeys().public_key);
    text += (i % 2 == 0 ? "  " : "") + keys.back() + (i % 3 == 0 ? " # laptop\r\n" : "\n");
  }
  Write(text, 0644);
  const auto clients = ReadAllowedClientsFile(path_);
  ASSERT_TRUE(clients.ok()) << clients.status();
  EXPECT_EQ(*clients, keys);
  // '#' is a letter of Z85.
  Write("#" + std::string(39, 'a') + "\n");
  EXPECT_EQ(ReadAllowedClientsFile(path_)->size(), 1U);
  Write("\n# nobody\n");
  EXPECT_THAT(std::string(ReadAllowedClientsFile(path_).status().message()),
              HasSubstr("lists no client key"));
  Write(keys[0] + "\nnot-a-key\n");
  EXPECT_THAT(std::string(ReadAllowedClientsFile(path_).status().message()), HasSubstr("line 2"));
}

TEST_F(CurveKeysTest, SurvivesHostileFiles) {
  RandomMessages random(/*seed=*/6);
  const CurveKeys keys = GenerateCurveKeys();
  for (int i = 0; i < FuzzIterations(2000); ++i) {
    Write(random.Mutated("public = " + keys.public_key + "\nsecret = " + keys.secret_key + "\n"));
    if (const auto read = ReadCurveKeyFile(path_); read.ok()) {
      EXPECT_TRUE(IsCurveKey(read->public_key) && IsCurveKey(read->secret_key));
    }
    Write(random.Mutated(keys.public_key + "\n" + keys.public_key + " # x\n"));
    if (const auto read = ReadAllowedClientsFile(path_); read.ok()) {
      EXPECT_FALSE(read->empty());
    }
  }
}

}  // namespace
}  // namespace zipage::transport
