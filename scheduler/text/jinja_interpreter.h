#pragma once
// Runs a parsed template: Jinja's scopes, loops, macros and output. One render, one thread.

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "scheduler/text/jinja_ast.h"
#include "scheduler/text/jinja_builtins.h"
#include "scheduler/text/jinja_value.h"

namespace zipage::jinja {

inline constexpr size_t kMaxOutputBytes = 64 << 20;

class Interpreter {
 public:
  // Errors go to `rt`, text to `out`; both outlive this, and so does the template.
  Interpreter(Runtime* rt, std::string* out) : rt_(rt), out_(out), scope_(&root_) {}

  // A variable that the template sees; the last one of a name counts.
  void SetVariable(std::string name, Value value) { root_.Set(name, std::move(value)); }

  void Run(const Body& body) { Execute(body); }

 private:
  // Variables of one block, and the scope around it.
  struct Scope {
    Scope* parent = nullptr;
    std::vector<std::pair<std::string, Value>> variables;

    Value* Find(std::string_view name);
    void Set(std::string_view name, Value value);
  };
  // Makes a new scope the current one for as long as it lives.
  class ScopeGuard;
  enum class Flow { kNext, kBreak, kContinue };

  // --- statements (jinja_interpreter.cc)
  Flow Execute(const Body& body);
  Flow ExecuteOne(const Stmt& statement);
  Flow ExecuteIf(const Stmt& statement);
  Flow ExecuteFor(const Stmt& statement);
  Flow ExecuteSetBlock(const Stmt& statement);
  Flow ExecuteFilterBlock(const Stmt& statement);
  Flow ExecuteWith(const Stmt& statement);
  std::string Capture(const Body& body, Flow* flow);
  void Assign(const Expr& target, const Value& value);
  void Write(std::string_view text);
  std::shared_ptr<const List> LoopItems(const Stmt& statement);

  // --- expressions (jinja_eval.cc)
  Value Eval(const Expr& expr);
  Value EvalKind(const Expr& expr);
  Value EvalName(const Expr& expr);
  Value EvalContainer(const Expr& expr);
  Value EvalSlice(const Expr& expr);
  Value EvalCompare(const Expr& expr);
  Value EvalConcat(const Expr& expr);
  Value EvalUnary(const Expr& expr);
  Value EvalFilters(const Expr& expr, const Value* block);
  Value Call(const Expr& expr);
  Value CallMacro(const Macro& macro, const Args& args);
  Args EvalArgs(const Expr& expr);

  Runtime* rt_;
  std::string* out_;
  Scope root_;
  Scope* scope_;
  int depth_ = 0;
  bool in_loop_filter_ = false;
};

}  // namespace zipage::jinja
