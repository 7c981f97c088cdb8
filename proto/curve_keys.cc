#include "proto/curve_keys.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

namespace zipage::transport {
namespace {

// Far above any list of clients; keeps a wrong path (a model file) from being read whole.
constexpr size_t kMaxFileBytes = 1 << 20;

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, bool must_be_private) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return absl::NotFoundError(
        absl::StrFormat("%s cannot be read: %s", path, std::strerror(errno)));
  }
  std::string text;
  absl::Status status;
  struct stat info = {};
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
    status = absl::InvalidArgumentError(absl::StrFormat("%s is not a file", path));
  } else if (must_be_private && (info.st_mode & 077) != 0) {
    status = absl::PermissionDeniedError(
        absl::StrFormat("%s holds a secret key but has mode %04o; run chmod 600 on it", path,
                        info.st_mode & 07777));
  } else {
    char buffer[4096];
    ssize_t n = 0;
    while (text.size() <= kMaxFileBytes && (n = read(fd, buffer, sizeof buffer)) > 0) {
      text.append(buffer, static_cast<size_t>(n));
    }
    if (n < 0) {
      status =
          absl::InternalError(absl::StrFormat("%s cannot be read: %s", path, std::strerror(errno)));
    } else if (text.size() > kMaxFileBytes) {
      status = absl::InvalidArgumentError(
          absl::StrFormat("%s is larger than %d bytes: no file of keys", path, kMaxFileBytes));
    }
  }
  close(fd);
  if (!status.ok()) return status;
  return text;
}

}  // namespace

bool IsCurveKey(std::string_view text) {
  constexpr std::string_view kPunctuation = ".-:+=^!/*?&<>()[]{}@%$#";
  if (text.size() != 40) return false;
  for (const char c : text) {
    const auto u = static_cast<unsigned char>(c);
    if (u >= 0x80 || (!std::isalnum(u) && kPunctuation.find(c) == std::string_view::npos))
      return false;
  }
  return true;
}

absl::StatusOr<CurveKeys> ReadCurveKeyFile(const std::string& path) {
  ZIPAGE_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, /*must_be_private=*/true));
  CurveKeys keys;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    line = absl::StripAsciiWhitespace(line);
    if (line.empty()) continue;
    // Only the first '=' divides: a key may hold others.
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(line, absl::MaxSplits('=', 1));
    const absl::string_view name = absl::StripAsciiWhitespace(parts.first);
    const absl::string_view value = absl::StripAsciiWhitespace(parts.second);
    std::string* key = name == "public"   ? &keys.public_key
                       : name == "secret" ? &keys.secret_key
                                          : nullptr;
    // The line itself may be a secret, so the error does not show it.
    if (key == nullptr || !key->empty() || !IsCurveKey({value.data(), value.size()})) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s is no CURVE key file; it needs the two lines \"public = KEY\" and \"secret = KEY\", "
          "keys of 40 characters",
          path));
    }
    *key = std::string(value);
  }
  if (keys.public_key.empty() || keys.secret_key.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has no %s key", path, keys.public_key.empty() ? "public" : "secret"));
  }
  return keys;
}

absl::Status WriteCurveKeyFile(const std::string& path, const CurveKeys& keys) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0 && errno == EEXIST) {
    return absl::AlreadyExistsError(
        absl::StrFormat("%s exists; remove it first or give another path", path));
  }
  if (fd < 0) {
    return absl::PermissionDeniedError(
        absl::StrFormat("%s cannot be written: %s", path, std::strerror(errno)));
  }
  const std::string text =
      absl::StrFormat("public = %s\nsecret = %s\n", keys.public_key, keys.secret_key);
  const ssize_t written = write(fd, text.data(), text.size());
  const int write_error = written < 0 ? errno : 0;
  if (close(fd) != 0 || written != static_cast<ssize_t>(text.size())) {
    unlink(path.c_str());
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s cannot be written: %s", path,
                        write_error != 0 ? std::strerror(write_error) : "disk full"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> ReadAllowedClientsFile(const std::string& path) {
  ZIPAGE_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, /*must_be_private=*/false));
  std::vector<std::string> keys;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    // '#' is a letter of Z85, so behind a key only " #" starts a comment.
    if (line.empty() || (line.front() == '#' && !IsCurveKey({line.data(), line.size()}))) continue;
    line = absl::StripAsciiWhitespace(line.substr(0, line.find(" #")));
    if (!IsCurveKey({line.data(), line.size()})) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s line %d is no public key of 40 characters of Z85", path, number));
    }
    keys.emplace_back(line);
  }
  if (keys.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s lists no client key, so no client could connect", path));
  }
  return keys;
}

}  // namespace zipage::transport
