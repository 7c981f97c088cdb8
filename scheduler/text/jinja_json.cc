// JSON in and out of template values: FromJson and ToJson of jinja_value.h.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_value.h"
#include "scheduler/text/utf8.h"

namespace zipage::jinja {
namespace {

constexpr size_t kMaxJsonBytes = 64 << 20;

class JsonWriter {
 public:
  JsonWriter(Runtime* rt, const JsonStyle& style, std::string* out)
      : rt_(rt), style_(style), out_(out) {}

  void Write(const Value& v, int level) {
    if (out_->size() > kMaxJsonBytes) rt_->Exhausted("tojson: the text is too long");
    if (!rt_->Charge(0)) return;
    if (v.is_none()) {
      *out_ += "null";
    } else if (v.is_bool()) {
      *out_ += v.as_bool() ? "true" : "false";
    } else if (v.is_int()) {
      *out_ += std::to_string(*v.index());
    } else if (v.is_float()) {
      *out_ += Number(v.as_float());
    } else if (v.is_string()) {
      WriteString(v.as_string());
    } else if (v.is_dict()) {
      WriteDict(v.as_dict(), level);
    } else if (v.is_list() &&
               (v.as_list().kind == List::Kind::kList || v.as_list().kind == List::Kind::kTuple)) {
      WriteList(v.as_list(), level);
    } else {
      rt_->Fail(absl::StrFormat("tojson: a value of type %s is not JSON (%s)", TypeName(v),
                                v.is_undefined() ? v.undefined_message() : "no such JSON type"));
    }
  }

 private:
  static std::string Number(double d) {
    if (std::isnan(d)) return "NaN";
    if (std::isinf(d)) return d < 0 ? "-Infinity" : "Infinity";
    return FloatRepr(d);
  }

  void NewLine(int level) {
    if (!style_.indent) return;
    *out_ += '\n';
    rt_->Charge(style_.indent->size() * static_cast<size_t>(level));
    for (int i = 0; i < level && rt_->ok(); ++i) *out_ += *style_.indent;
  }

  void WriteList(const List& list, int level) {
    if (list.items.empty()) {
      *out_ += "[]";
      return;
    }
    *out_ += '[';
    for (size_t i = 0; i < list.items.size() && rt_->ok(); ++i) {
      if (i > 0) *out_ += style_.item_separator;
      NewLine(level + 1);
      Write(list.items[i], level + 1);
    }
    NewLine(level);
    *out_ += ']';
  }

  void WriteDict(const Dict& dict, int level) {
    if (dict.entries.empty()) {
      *out_ += "{}";
      return;
    }
    std::vector<const std::pair<Value, Value>*> entries;
    for (const auto& entry : dict.entries) entries.push_back(&entry);
    if (style_.sort_keys) {
      if (dict.by_name.size() != entries.size()) {
        rt_->Unsupported("tojson(sort_keys=true) of keys that are no strings");
        return;
      }
      std::sort(entries.begin(), entries.end(), [](const auto* a, const auto* b) {
        return a->first.as_string() < b->first.as_string();
      });
    }
    *out_ += '{';
    for (size_t i = 0; i < entries.size() && rt_->ok(); ++i) {
      if (i > 0) *out_ += style_.item_separator;
      NewLine(level + 1);
      const Value& key = entries[i]->first;
      if (key.is_string()) {
        WriteString(key.as_string());
      } else {
        *out_ += '"';
        Write(key, level);
        *out_ += '"';
      }
      *out_ += style_.key_separator;
      Write(entries[i]->second, level + 1);
    }
    NewLine(level);
    *out_ += '}';
  }

  void WriteString(const std::string& text) {
    if (!rt_->Charge(text.size())) return;
    *out_ += '"';
    for (size_t i = 0; i < text.size();) {
      Utf8Char c = DecodeUtf8(std::string_view(text).substr(i));
      if (!WriteEscape(c.code_point)) out_->append(text, i, c.size);
      i += c.size;
    }
    *out_ += '"';
  }

  // Writes the escape of a code point that needs one.
  bool WriteEscape(char32_t c) {
    static constexpr std::string_view kPlain = "\"\\\n\r\t\b\f";
    static constexpr std::string_view kLetter = "\"\\nrtbf";
    size_t at = c < 0x80 ? kPlain.find(static_cast<char>(c)) : std::string_view::npos;
    if (at != std::string_view::npos) {
      *out_ += {'\\', kLetter[at]};
      return true;
    }
    if (c >= 0x20 && (!style_.ensure_ascii || c < 0x7F)) return false;
    if (c >= 0x10000) {
      uint32_t rest = static_cast<uint32_t>(c) - 0x10000;
      *out_ += absl::StrFormat("\\u%04x\\u%04x", 0xD800 + (rest >> 10), 0xDC00 + (rest & 0x3FF));
    } else {
      *out_ += absl::StrFormat("\\u%04x", static_cast<uint32_t>(c));
    }
    return true;
  }

  Runtime* rt_;
  const JsonStyle& style_;
  std::string* out_;
};

}  // namespace

Value FromJson(Runtime* rt, const nlohmann::ordered_json& json, int depth) {
  if (depth >= kMaxValueDepth) {
    rt->Exhausted("the conversation's JSON is nested too deeply");
    return Value();
  }
  using Type = nlohmann::ordered_json::value_t;
  switch (json.type()) {
    case Type::boolean:
      return Value(json.get<bool>());
    case Type::number_integer:
      return Value(json.get<int64_t>());
    case Type::number_unsigned: {
      uint64_t u = json.get<uint64_t>();
      if (u > static_cast<uint64_t>(INT64_MAX)) rt->Unsupported("an integer above 2^63 - 1");
      return Value(static_cast<int64_t>(u));
    }
    case Type::number_float:
      return Value(json.get<double>());
    case Type::string:
      return Value(json.get_ref<const std::string&>());
    case Type::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const auto& item : json) items.push_back(FromJson(rt, item, depth + 1));
      return MakeList(rt, std::move(items));
    }
    case Type::object: {
      std::vector<std::pair<Value, Value>> entries;
      entries.reserve(json.size());
      for (auto it = json.begin(); it != json.end(); ++it) {
        entries.emplace_back(Value(it.key()), FromJson(rt, it.value(), depth + 1));
      }
      return MakeDict(rt, entries);
    }
    default:
      return Value::MakeNone();
  }
}

std::string ToJson(Runtime* rt, const Value& value, const JsonStyle& style) {
  std::string out;
  JsonWriter(rt, style, &out).Write(value, 0);
  return out;
}

}  // namespace zipage::jinja
