// Statements of the template interpreter.
#include "scheduler/text/jinja_interpreter.h"

#include "absl/strings/str_format.h"
#include "scheduler/text/jinja_scope.h"

namespace zipage::jinja {
namespace {

// An empty iteration takes about as long as copying this many bytes.
constexpr size_t kIterationCost = 128;

}  // namespace

Value* Interpreter::Scope::Find(std::string_view name) {
  for (Scope* scope = this; scope != nullptr; scope = scope->parent) {
    for (auto& [key, value] : scope->variables) {
      if (key == name) return &value;
    }
  }
  return nullptr;
}

void Interpreter::Scope::Set(std::string_view name, Value value) {
  for (auto& [key, old] : variables) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  variables.emplace_back(std::string(name), std::move(value));
}

Interpreter::Flow Interpreter::Execute(const Body& body) {
  for (const auto& statement : body) {
    rt_->set_line(statement->line);
    if (!rt_->Charge(0)) return Flow::kNext;
    Flow flow = ExecuteOne(*statement);
    if (flow != Flow::kNext) return flow;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::ExecuteOne(const Stmt& statement) {
  switch (statement.kind) {
    case Stmt::Kind::kText:
      Write(statement.text);
      return Flow::kNext;
    case Stmt::Kind::kPrint: {
      Value value = Eval(*statement.value);
      if (rt_->ok()) Write(value.is_markup() ? value.as_markup() : Str(rt_, value));
      return Flow::kNext;
    }
    case Stmt::Kind::kIf:
      return ExecuteIf(statement);
    case Stmt::Kind::kFor:
      return ExecuteFor(statement);
    case Stmt::Kind::kSet:
      Assign(*statement.target, Eval(*statement.value));
      return Flow::kNext;
    case Stmt::Kind::kSetBlock:
      return ExecuteSetBlock(statement);
    case Stmt::Kind::kMacro: {
      auto callable = std::make_shared<Callable>();
      callable->kind = Callable::Kind::kMacro;
      callable->name = statement.macro.name;
      callable->macro = &statement.macro;
      scope_->Set(statement.macro.name, Value(std::shared_ptr<const Callable>(callable)));
      return Flow::kNext;
    }
    case Stmt::Kind::kFilterBlock:
      return ExecuteFilterBlock(statement);
    case Stmt::Kind::kWith:
      return ExecuteWith(statement);
    case Stmt::Kind::kScope: {
      ScopeGuard guard(this, scope_);
      return Execute(statement.body);
    }
    case Stmt::Kind::kBreak:
      return Flow::kBreak;
    case Stmt::Kind::kContinue:
      return Flow::kContinue;
  }
  return Flow::kNext;
}

Interpreter::Flow Interpreter::ExecuteIf(const Stmt& statement) {
  for (const auto& [test, body] : statement.branches) {
    bool holds = Truthy(Eval(*test));
    if (!rt_->ok()) return Flow::kNext;
    if (holds) return Execute(body);
  }
  return Execute(statement.else_body);
}

// What the loop goes through: the elements that its `if` lets pass.
std::shared_ptr<const List> Interpreter::LoopItems(const Stmt& statement) {
  std::shared_ptr<const List> all = Iterate(rt_, Eval(*statement.value));
  if (statement.test == nullptr) return all;
  auto kept = std::make_shared<List>();
  kept->depth = all->depth;
  // Jinja filters while it loops. That is the same unless the test reads what the body changes,
  // which only a namespace makes possible; reading one there is refused.
  bool outer = std::exchange(in_loop_filter_, true);
  for (const Value& item : all->items) {
    ScopeGuard guard(this, scope_);
    Assign(*statement.target, item);
    bool holds = Truthy(Eval(*statement.test));
    if (!rt_->ok()) break;
    if (holds) kept->items.push_back(item);
  }
  in_loop_filter_ = outer;
  return kept;
}

Interpreter::Flow Interpreter::ExecuteFor(const Stmt& statement) {
  std::shared_ptr<const List> items = LoopItems(statement);
  if (!rt_->ok()) return Flow::kNext;
  for (size_t i = 0; i < items->items.size(); ++i) {
    if (!rt_->Charge(kIterationCost)) break;
    ScopeGuard guard(this, scope_);
    auto loop = std::make_shared<Loop>();
    loop->items = items;
    loop->index0 = i;
    scope_->Set("loop", Value(std::move(loop)));
    rt_->set_line(statement.line);
    Assign(*statement.target, items->items[i]);
    Flow flow = Execute(statement.body);
    if (!rt_->ok() || flow == Flow::kBreak) break;
  }
  if (!items->items.empty() || statement.else_body.empty()) return Flow::kNext;
  ScopeGuard guard(this, scope_);
  return Execute(statement.else_body);
}

std::string Interpreter::Capture(const Body& body, Flow* flow) {
  ScopeGuard guard(this, scope_);
  std::string text;
  std::string* outer = std::exchange(out_, &text);
  *flow = Execute(body);
  out_ = outer;
  return text;
}

Interpreter::Flow Interpreter::ExecuteSetBlock(const Stmt& statement) {
  Flow flow = Flow::kNext;
  Value text(Capture(statement.body, &flow));
  if (flow != Flow::kNext) return flow;  // a break leaves the variable alone
  if (statement.value != nullptr) text = EvalFilters(*statement.value, &text);
  Assign(*statement.target, text);
  return Flow::kNext;
}

Interpreter::Flow Interpreter::ExecuteFilterBlock(const Stmt& statement) {
  Flow flow = Flow::kNext;
  Value text(Capture(statement.body, &flow));
  if (flow != Flow::kNext) return flow;
  Value filtered = EvalFilters(*statement.value, &text);
  if (rt_->ok()) Write(filtered.is_markup() ? filtered.as_markup() : Str(rt_, filtered));
  return Flow::kNext;
}

Interpreter::Flow Interpreter::ExecuteWith(const Stmt& statement) {
  std::vector<Value> values;
  for (const auto& binding : statement.bindings) values.push_back(Eval(*binding.second));
  ScopeGuard guard(this, scope_);
  for (size_t i = 0; i < values.size(); ++i) Assign(*statement.bindings[i].first, values[i]);
  return Execute(statement.body);
}

void Interpreter::Assign(const Expr& target, const Value& value) {
  if (!rt_->ok()) return;
  if (target.kind == Expr::Kind::kName) {
    scope_->Set(target.name, value);
    return;
  }
  if (target.kind == Expr::Kind::kTuple) {
    std::shared_ptr<const List> items = Iterate(rt_, value);
    if (rt_->ok() && items->items.size() != target.args.size()) {
      rt_->Fail(absl::StrFormat("%d values for %d names", items->items.size(), target.args.size()));
    }
    for (size_t i = 0; i < target.args.size() && rt_->ok(); ++i) {
      Assign(*target.args[i], items->items[i]);
    }
    return;
  }
  Value* ns = scope_->Find(target.name);
  if (ns == nullptr || !ns->is_namespace()) {
    rt_->Fail(absl::StrFormat("'%s' is no namespace; its attributes cannot be set", target.name));
    return;
  }
  if (value.is_namespace()) {
    rt_->Unsupported("a namespace in a namespace");
    return;
  }
  for (auto& [name, old] : ns->as_namespace().attributes) {
    if (name == target.ops[0]) {
      old = value;
      return;
    }
  }
  ns->as_namespace().attributes.emplace_back(target.ops[0], value);
}

void Interpreter::Write(std::string_view text) {
  if (!rt_->Charge(text.size())) return;
  if (out_->size() + text.size() > kMaxOutputBytes) {
    rt_->Exhausted("the rendering is longer than 64 MiB");
    return;
  }
  out_->append(text);
}

}  // namespace zipage::jinja
