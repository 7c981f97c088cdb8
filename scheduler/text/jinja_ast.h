#pragma once
// The parsed form of a template. Immutable once parsed; any thread. Trees are at most
// kMaxExprDepth and kMaxBlockDepth deep, so that walking and destroying them is safe.

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/text/jinja_value.h"

namespace zipage::jinja {

inline constexpr int kMaxExprDepth = 150;
inline constexpr int kMaxBlockDepth = 60;

struct Expr;
using ExprPtr = std::unique_ptr<const Expr>;

struct Expr {
  enum class Kind {
    kConst,   // value
    kName,    // name
    kNsRef,   // target of {% set name.attribute = %}: name, and `attribute` in ops[0]
    kList,    // args
    kTuple,   // args
    kDict,    // args: key, value, key, value, ...
    kAttr,    // args[0].name
    kItem,    // args[0][args[1]]
    kSlice,   // args[0][args[1]:args[2]:args[3]], the last three may be null
    kCall,    // args[0](args[1..], kwargs)
    kFilter,  // args[0] | name(args[1..], kwargs); args[0] null at the start of a filter block
    kTest,    // args[0] is name(args[1..], kwargs)
    kNot,
    kNegate,
    kPlus,  // unary
    kAnd,
    kOr,
    kBinary,   // args[0] name args[1], an arithmetic operator
    kConcat,   // args joined by ~
    kCompare,  // args[0] ops[0] args[1] ops[1] args[2] ...
    kCond,     // args[1] if args[0] else args[2]; args[2] may be null
  };
  Kind kind;
  int line;
  int depth = 1;
  std::string name;
  Value value;
  std::vector<ExprPtr> args;
  std::vector<std::pair<std::string, ExprPtr>> kwargs;
  std::vector<std::string> ops;
};

struct Stmt;
using Body = std::vector<std::unique_ptr<const Stmt>>;

// A macro: its parameters, the last ones with defaults.
struct Macro {
  std::string name;
  std::vector<std::string> params;
  std::vector<ExprPtr> defaults;
  Body body;
};

struct Stmt {
  enum class Kind {
    kText,         // text
    kPrint,        // value
    kIf,           // branches, else_body
    kFor,          // for target in value if test: body, else_body
    kSet,          // target = value
    kSetBlock,     // target = body, through the filters in value (may be null)
    kMacro,        // macro
    kFilterBlock,  // body through the filters in value
    kWith,         // bindings, body
    kScope,        // body in a scope of its own
    kBreak,
    kContinue,
  };
  Kind kind;
  int line;
  std::string text;
  ExprPtr target;
  ExprPtr value;
  ExprPtr test;
  Body body;
  Body else_body;
  std::vector<std::pair<ExprPtr, Body>> branches;
  std::vector<std::pair<ExprPtr, ExprPtr>> bindings;
  Macro macro;
};

}  // namespace zipage::jinja
