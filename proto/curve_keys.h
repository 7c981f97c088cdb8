#pragma once
// CURVE keys and the files that hold them. A key file has two lines, a list of clients one key a
// line:
//   public = rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7       # deploy.clients: the keys let in
//   secret = 8E0bdwE)8jBd&(]>H3!fE5VVZjq6zm9?l#<KF5D* rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7

#include <string>
#include <string_view>
#include <vector>

#include "proto/status.h"

namespace zipage::transport {

// Keys of one side, Z85 text of 40 characters each.
struct CurveKeys {
  std::string public_key;
  std::string secret_key;
};

// True for 40 characters of the Z85 alphabet.
bool IsCurveKey(std::string_view text);

// Refuses a file that others may read (kPermissionDenied) or that is not of the form above.
absl::StatusOr<CurveKeys> ReadCurveKeyFile(const std::string& path);

// Writes a new file of mode 0600. kAlreadyExists if there is one: a key is never overwritten.
absl::Status WriteCurveKeyFile(const std::string& path, const CurveKeys& keys);

// Public keys, one a line; blank lines and what follows " #" or a leading '#' are comments. A file
// without a key is an error: it would let nobody in.
absl::StatusOr<std::vector<std::string>> ReadAllowedClientsFile(const std::string& path);

}  // namespace zipage::transport
